#pragma once

#include <functional>

#include "checkpoint/convert/tensor_stream.h"
#include "models/config/weight_files.h"

namespace megashard {

using StreamChange = std::function<TensorStream(TensorStream)>;

/// For the converters: the experts of a layer (stacked_experts.h)
/// from the shapes in files that Hugging Face publishes, or that transformers has in memory, to
/// those of parameters, each by itself; and back to the published ones. Tensors that have the
/// shapes already stay. Null where both are the same. A stack without its other half, or that lacks
/// an expert, throws an error. One stack at a time is in memory.
StreamChange to_parameter_experts(WeightFiles::Experts published);
StreamChange to_published_experts(WeightFiles::Experts published);

}  // namespace megashard
