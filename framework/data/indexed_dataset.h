#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "framework/data/gpt_dataset.h"

namespace megashard {

inline constexpr char kIndexMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
inline constexpr uint64_t kIndexVersion = 1;
inline constexpr size_t kIndexHeaderBytes = 34;

/// Dtype codes of a .idx file (megatron.core.datasets.indexed_dataset.DType).
enum class TokenType : uint8_t {
  kUInt8 = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat64 = 6,
  kFloat32 = 7,
  kUInt16 = 8,
};

/// Bytes of one token; 0 for an unknown code.
int64_t token_bytes(TokenType type);

/// PREFIX.bin and PREFIX.idx, mapped into memory. The constructor checks the whole index (magic, version, counts, file
/// sizes, that every sequence lies inside .bin). Throws an error with the file and the remedy.
class IndexedDataset : public TokenSource {
 public:
  explicit IndexedDataset(const std::string& prefix);

  TokenType token_type() const { return type_; }
  std::span<const int32_t> sequence_lengths() const override { return lengths_; }
  /// [documents + 1]: the sequence number at which each document starts, then the number of sequences.
  std::span<const int64_t> document_indices() const { return documents_; }

  /// Throws if the file has a float dtype.
  void copy_tokens(int64_t sequence, int64_t offset, std::span<int64_t> out) const override;
  /// The stored bytes of one sequence.
  std::span<const std::byte> raw_sequence(int64_t sequence) const;
  const std::string& name() const override { return prefix_; }

 private:
  void read_index();
  void check_sequences() const;
  int64_t pointer(int64_t sequence) const;

  std::string prefix_;
  MappedFile index_;
  MappedFile bin_;
  TokenType type_ = TokenType::kInt32;
  // Aligned copies: the arrays of .idx start at odd offsets.
  std::vector<int32_t> lengths_;
  std::vector<int64_t> documents_;
  const std::byte* pointers_ = nullptr;  // [sequences] i64, unaligned, inside index_
};

/// The message for a data set's prefix without .bin and .idx: the cause and the remedy. Recognises text that was not
/// tokenised, prefixes with an extension or without _text_document, and folders.
std::string why_no_tokens(const std::string& prefix);

}  // namespace megashard
