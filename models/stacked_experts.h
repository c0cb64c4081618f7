#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/hugging_face/hf_weights.h"
#include "parallel/fsdp/sharded_tensor.h"

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
  /// A view of it, [out, in] whichever way it is stored; undefined where it has no such expert or
  /// other dimensions.
  at::Tensor view(const HfWeights& files) const;
};

/// The expert in any key that names one: "optimizer.state.model.layers.3.mlp.experts.7....exp_avg".
std::optional<int64_t> expert_of(const std::string& key);

/// The tensors of a model with the experts' weights as pieces of stacked ones ([E, 2 I, C] and
/// [E, C, I]), for save_hf_sharded. `num_experts` is E.
ShardedTensors stack_experts(const ShardedTensors& tensors, int64_t num_experts);

}  // namespace megashard
