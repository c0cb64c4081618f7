#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/weight_layout.h"
#include "checkpoint/readers/checkpoint_reader.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// Tensors of a checkpoint on their way through a converter, by their torch_dcp keys
/// ("model.<name>", "optimizer.state.<name>.exp_avg"). None is read before it is asked for.
struct TensorStream {
  std::vector<TensorInfo> tensors;                         ///< in the order in which they are read best
  std::function<at::Tensor(const std::string& key)> read;  ///< whole, on the CPU
  std::string where;                                       ///< for messages
};

/// All tensors of a checkpoint but those in its plain values and further keys of tied ones.
TensorStream stream_of(const std::shared_ptr<CheckpointReader>& reader);

/// The same tensors under Megatron's names and in its order of rows; the optimizer's buffers follow
/// their weights. A weight that the layout needs and the stream lacks, or that the layout has no
/// place for, is an error that lists them.
TensorStream as_megatron(TensorStream stream, const WeightLayout& layout);
/// The way back. One Megatron weight is kept for the sources that come from it.
TensorStream as_hugging_face(TensorStream stream, const WeightLayout& layout);

/// Changes the weights' names in values' optimizer.param_groups: to Megatron's, or back.
void rename_groups(Dict& values, const WeightLayout& layout, bool to_megatron);

}  // namespace megashard
