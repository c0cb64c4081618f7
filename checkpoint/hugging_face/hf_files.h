#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/values/tensor_info.h"

namespace megashard {

/// The files that a model's weights go to: model.safetensors, or model-0000i-of-0000n.safetensors
/// in the order of the weights when `most_bytes` of data are exceeded (a larger tensor has a file
/// of its own).
struct HfFilePlan {
  struct File {
    std::string name;
    std::vector<TensorInfo> tensors;
  };
  std::vector<File> files;
};

HfFilePlan plan_hf_files(const std::vector<TensorInfo>& tensors, int64_t most_bytes);

/// Once these files are there: writes model.safetensors.index.json where there are several, and
/// removes the weights of an earlier save.
void finish_hf_files(const std::string& directory, const HfFilePlan& plan);

}  // namespace megashard
