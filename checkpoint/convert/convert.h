#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/files/work_progress.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {

// What the converters share.

/// Takes one line about what a conversion has done.
using ConvertProgress = std::function<void(const std::string& line)>;

/// Counts tensors and their bytes: a long work, of which the last tensor says a line.
class TensorCounter {
 public:
  TensorCounter(const ConvertProgress& progress, size_t total, int64_t total_bytes)
      : progress_(progress), total_(total), work_("convert", total_bytes) {}
  void add(int64_t bytes);

 private:
  const ConvertProgress& progress_;
  size_t total_;
  size_t count_ = 0;
  int64_t bytes_ = 0;
  LongWork work_;
};

int64_t total_bytes(const std::vector<TensorInfo>& tensors);

/// Throws unless `folder`, as it was given to `flag`, is there and may be one step's: of a
/// directory of steps it names the one to give, of weights the converter to take. Checks the small
/// files of the step, which say what it holds, as check_source_bytes does.
void check_step_folder(const std::string& folder, const std::string& flag);

/// Reads every byte of a step and compares it with manifest.json; throws an error that names the
/// damaged file. A step without one, from PyTorch or Megatron, has no checksums: files that are too
/// short are found when they are read.
void check_source_bytes(const std::string& folder, const ConvertProgress& progress);

/// Throws when something is at `path`, which a converter would have to replace; an empty folder may
/// be there.
void refuse_existing(const std::string& path, const std::string& flag);

}  // namespace megashard
