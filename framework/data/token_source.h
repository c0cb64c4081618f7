#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace megashard {

/// Numbered sequences of token ids, from which a dataset cuts its samples (Megatron's low-level dataset). Safe to read
/// from several threads.
class TokenSource {
 public:
  virtual ~TokenSource() = default;

  /// Number of tokens of each sequence.
  virtual std::span<const int32_t> sequence_lengths() const = 0;

  /// Copies tokens [offset, offset + out.size()) of one sequence.
  virtual void copy_tokens(int64_t sequence, int64_t offset, std::span<int64_t> out) const = 0;

  /// For messages: the path prefix of the files, or "mock data".
  virtual const std::string& name() const = 0;
};

}  // namespace megashard
