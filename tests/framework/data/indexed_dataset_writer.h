#pragma once

#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "framework/data/indexed_dataset.h"

namespace megashard {

// Writes PREFIX.bin and PREFIX.idx byte for byte as Megatron's IndexedDatasetBuilder. The index
// appears only in finish(): without it there is no readable set.
class IndexedDatasetWriter {
 public:
  IndexedDatasetWriter(const std::string& prefix, TokenType type);

  // Appends one sequence; a token that the type cannot hold is an error.
  void add_sequence(std::span<const int64_t> tokens);
  // Ends the document that the sequences since the last call belong to.
  void end_document();
  // One sequence that is a document of its own.
  void add_document(std::span<const int64_t> tokens);
  // Closes .bin and writes .idx. Sequences after the last end_document() make a last document.
  void finish();

 private:
  std::string prefix_;
  TokenType type_;
  std::ofstream bin_;
  std::vector<int32_t> lengths_;
  std::vector<int64_t> documents_{0};
  std::vector<char> buffer_;
};

}  // namespace megashard
