#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/files/work_progress.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {

// Shared parts of the converters.

/// Receives one line about the progress of a conversion.
using ConvertProgress = std::function<void(const std::string& line)>;

/// Reports the progress of a conversion in tensors and bytes; the last tensor logs a line.
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

/// Throws unless `folder`, the value of `flag`, exists and can be one step's. For a directory of steps the error names
/// the step to pass, for weights the converter to use. Validates the small files that describe the step, as
/// check_source_bytes does.
void check_step_folder(const std::string& folder, const std::string& flag);

/// Reads every byte of a step and compares it with manifest.json. Throws an error that names the damaged file. A step
/// without a manifest, from PyTorch or Megatron, has no checksums; truncated files are detected when they are read.
void check_source_bytes(const std::string& folder, const ConvertProgress& progress);

/// Throws if `path` exists, because a converter would have to replace it. An empty folder is accepted.
void refuse_existing(const std::string& path, const std::string& flag);

}  // namespace megashard
