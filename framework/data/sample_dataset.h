#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

namespace megashard {

// What the samples of a set are cut from, and how often they go through it.
struct DatasetFacts {
  std::string unit = "document";  // or "conversation", each of which is a sample
  int64_t documents = 0;
  int64_t tokens = 0;
  double fewest_epochs = std::numeric_limits<double>::infinity();  // of a blend's members
  double most_epochs = 0;

  void add_epochs(double epochs) {
    fewest_epochs = std::min(fewest_epochs, epochs);
    most_epochs = std::max(most_epochs, epochs);
  }
};

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

  // Adds what the first `samples` samples are cut from.
  virtual void add_facts(int64_t samples, DatasetFacts& facts) const = 0;
};

}  // namespace megashard
