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
#include "checkpoint/weights/weight_map.h"

namespace megashard {

/// Tensors of a checkpoint that pass through a converter, by torch_dcp keys ("model.<name>",
/// "optimizer.state.<name>.exp_avg"). Each is read on request.
struct TensorStream {
  std::vector<TensorInfo> tensors;                         ///< in the best order for reading
  std::function<at::Tensor(const std::string& key)> read;  ///< the whole tensor on the CPU
  std::string where;                                       ///< source, for messages
};

/// All tensors of a checkpoint except those in its plain values and additional keys of tied ones.
TensorStream stream_of(const std::shared_ptr<CheckpointReader>& reader);

/// The weights ("model.<name>") in the model's tensors, from any of the forms of the map; in the published form. Groups
/// that have no form of it stay as they are. Keep the tensors of one group in memory.
TensorStream as_model(TensorStream stream, const WeightMap& map);
TensorStream as_published(TensorStream stream, const WeightMap& map);

/// The tensors with Megatron's names and row order; optimizer buffers follow their weights. Throws and lists the
/// weights that the layout needs and the stream lacks, or that the layout does not have.
TensorStream as_megatron(TensorStream stream, const WeightLayout& layout);
/// Inverse of as_megatron. Keeps one Megatron weight in memory for the sources that are cut from it.
TensorStream as_hugging_face(TensorStream stream, const WeightLayout& layout);

/// Renames the weights in optimizer.param_groups of `values`: to Megatron's names, or back.
void rename_groups(Dict& values, const WeightLayout& layout, bool to_megatron);

}  // namespace megashard
