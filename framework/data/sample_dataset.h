#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace megashard {

// A numbered set of training samples, each of seq_length + 1 tokens (inputs and labels overlap by
// all but one). Safe to read from several threads.
class SampleDataset {
 public:
  virtual ~SampleDataset() = default;

  virtual int64_t size() const = 0;

  // out.size() == seq_length + 1.
  virtual void read(int64_t index, std::span<int64_t> out) const = 0;

  // Where sample `index` comes from, for messages: the path prefix of its files.
  virtual const std::string& source_of(int64_t index) const = 0;
};

}  // namespace megashard
