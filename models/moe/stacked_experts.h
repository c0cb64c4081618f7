#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/readers/checkpoint_reader.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Files that hold the experts E of a layer in two tensors, as transformers has them in memory:
/// `mlp.experts.gate_up_proj` [E, 2 I, C], the gate's rows first, and `mlp.experts.down_proj`
/// [E, C, I]; or, as Qwen3-VL-MoE's published files, [E, C, 2 I] and [E, I, C].

/// Where the weight of one expert lies in them.
struct StackedWeight {
  std::string experts;  ///< "model.layers.3.mlp.experts"
  int64_t expert = 0;
  enum class Part { kGate, kUp, kDown } part = Part::kGate;

  /// Of "model.layers.3.mlp.experts.7.gate_proj.weight"; nothing for other names.
  static std::optional<StackedWeight> of(const std::string& name);
  /// The tensor in the files.
  std::string source() const;
  /// The other one of its layer.
  std::string other_source() const;
  /// A view of it, [out, in] whichever way it is stored; undefined where it has no such expert or
  /// other dimensions.
  at::Tensor view(CheckpointReader& files) const;
  /// The same of the tensor, where the other one of the layer has `other_sizes`.
  at::Tensor view(const at::Tensor& whole, at::IntArrayRef other_sizes) const;
};

/// The expert in any key that names one: "optimizer.state.model.layers.3.mlp.experts.7....exp_avg".
std::optional<int64_t> expert_of(const std::string& key);

/// The tensors of a model with the experts' weights as pieces of stacked ones ([E, 2 I, C] and
/// [E, C, I]), for save_hf_sharded. `num_experts` is E.
ShardedTensors stack_experts(const ShardedTensors& tensors, int64_t num_experts);
/// The same as Qwen3-VL-MoE publishes them (stacks_transposed). A shard of rows would be columns of
/// the files, a few bytes at a time: so the ranks that share an expert gather it, and one of them
/// has it whole. Collective.
ShardedTensors stack_experts_transposed(const ShardedTensors& tensors, int64_t num_experts);

/// Whether stacks of experts [2 I, C] and [C, I] are written as [E, C, 2 I] and [E, I, C], as
/// published. transformers takes a tensor of the sizes of its own for its own, so it would not turn
/// square ones: models that have some get transformers' form.
bool stacks_transposed(int64_t hidden_size, int64_t intermediate_size);

}  // namespace megashard
