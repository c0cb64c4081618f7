#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/sharded_tensor.h"

namespace megashard {

/// Forms that a checkpoint may have of a tensor of stacked experts (experts.h), a weight, its adapter or its optimizer
/// state: the experts one by one (ours before they were stacked), and gate_up_proj as [E, 2 I, C] (PyTorch's, of
/// transformers' models). Empty for other keys. `num_experts`: of the layer.
std::vector<ShardedTensors> checkpoint_forms(const std::string& key, const ShardedTensor& tensor, int64_t num_experts);

/// True for the name of a parameter of stacked experts or of its adapter.
bool is_of_experts(const std::string& name);

}  // namespace megashard
