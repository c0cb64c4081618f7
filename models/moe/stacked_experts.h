#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/readers/checkpoint_reader.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Files with the E experts of a layer in two tensors, as in transformers' memory: `mlp.experts.gate_up_proj`
/// [E, 2 I, C], the gate's rows first, and `mlp.experts.down_proj` [E, C, I]; or transposed, as in Qwen3-VL-MoE's
/// published files: [E, C, 2 I] and [E, I, C].

/// Location of one expert's weight in them.
struct StackedWeight {
  std::string experts;  ///< "model.layers.3.mlp.experts"
  int64_t expert = 0;
  enum class Part { kGate, kUp, kDown } part = Part::kGate;

  /// Parses "model.layers.3.mlp.experts.7.gate_proj.weight"; nullopt for other names.
  static std::optional<StackedWeight> of(const std::string& name);
  /// Name of the tensor in the files.
  std::string source() const;
  /// Name of the layer's other tensor.
  std::string other_source() const;
  /// The expert's weight as a view [out, in]; undefined if the tensor lacks the expert or has other dimensions.
  at::Tensor view(CheckpointReader& files) const;
  /// As above from the tensor itself; `other_sizes`: sizes of the layer's other tensor.
  at::Tensor view(const at::Tensor& whole, at::IntArrayRef other_sizes) const;
};

/// Number of the expert in a key such as "optimizer.state.model.layers.3.mlp.experts.7....exp_avg"; nullopt if none.
std::optional<int64_t> expert_of(const std::string& key);

/// Replaces the experts' weights by pieces of stacked tensors ([E, 2 I, C] and [E, C, I]), for save_hf_sharded.
/// `num_experts`: E.
ShardedTensors stack_experts(const ShardedTensors& tensors, int64_t num_experts);
/// As above, transposed. A shard of rows would be columns in the files, a few bytes at a time; so the ranks that share
/// an expert gather it, and one of them holds it whole. Collective.
ShardedTensors stack_experts_transposed(const ShardedTensors& tensors, int64_t num_experts);

/// True if stacks of experts [2 I, C] and [C, I] are written transposed, as published. transformers transposes a tensor
/// only if its sizes differ from its own, so models with square experts are written in transformers' form.
bool stacks_transposed(int64_t hidden_size, int64_t intermediate_size);

}  // namespace megashard
