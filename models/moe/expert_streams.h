#pragma once

#include <functional>

#include "checkpoint/convert/tensor_stream.h"
#include "models/config/weight_files.h"

namespace megashard {

using StreamChange = std::function<TensorStream(TensorStream)>;

/// For the converters: split stacked experts (stacked_experts.h), as published or as in transformers' memory, into one
/// tensor per parameter, and stack them again as published. Tensors that already have the target's shape are unchanged.
/// Null if both forms are equal. Throw for a stack without its other half, or without an expert. Keep one stack at a
/// time in memory.
StreamChange to_parameter_experts(WeightFiles::Experts published);
StreamChange to_published_experts(WeightFiles::Experts published);

}  // namespace megashard
