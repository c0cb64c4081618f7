#pragma once

#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "framework/data/indexed_dataset.h"

namespace megashard {

// Writes PREFIX.bin and PREFIX.idx byte for byte as Megatron's IndexedDatasetBuilder. Only finish() writes the index;
// without it the set cannot be read.
class IndexedDatasetWriter {
 public:
  IndexedDatasetWriter(const std::string& prefix, TokenType type);

  // Appends one sequence. Throws if the type cannot hold a token.
  void add_sequence(std::span<const int64_t> tokens);
  // Ends the document of the sequences since the last call.
  void end_document();
  // Appends one sequence that is a document by itself.
  void add_document(std::span<const int64_t> tokens);
  // Closes .bin and writes .idx. Sequences after the last end_document() form a last document.
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
