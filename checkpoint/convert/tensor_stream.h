#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

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

/// A model in megatron-core's checkpoints. Supplied by the model family (ModelRegistry::layout).
struct MegatronLayout {
  WeightMap weights;  ///< every weight of the model, in one form: Megatron's names and rows
  /// Megatron modules with an _extra_state (of TransformerEngine). Written empty, because megatron-core requires them.
  std::vector<std::string> stateful_modules;
  /// Megatron's arguments that describe the network, for the checkpoint's `args`.
  Dict arguments;
};

/// All tensors of a checkpoint except those in its plain values and additional keys of tied ones.
TensorStream stream_of(const std::shared_ptr<CheckpointReader>& reader);

/// The tensors in the model's form, from any form of the map; in the published form, from any other. The optimizer's
/// buffers follow their weights. A tensor made of several has the dtype that holds all of theirs. Groups that have no
/// form of the map stay as they are. Keep the tensors of one group in memory.
TensorStream as_model(TensorStream stream, const WeightMap& map);
TensorStream as_published(TensorStream stream, const WeightMap& map);

/// as_published and as_model for a map of all weights, in its order. Throw and list the weights that the map needs and
/// the stream lacks or has with other sizes, and those that the map does not have.
TensorStream as_megatron(TensorStream stream, const WeightMap& all);
TensorStream as_hugging_face(TensorStream stream, const WeightMap& all);

/// Renames the weights in optimizer.param_groups of `values`: to the published names of the map, or back.
void rename_groups(Dict& values, const WeightMap& map, bool to_published);

}  // namespace megashard
