#pragma once

#include <functional>
#include <string>

#include "checkpoint/convert/tensor_stream.h"

namespace megashard {

using StreamChange = std::function<TensorStream(TensorStream)>;

/// Of a config.json's model_type, for the converters: the experts of a layer (stacked_experts.h)
/// from the shapes in files that Hugging Face publishes, or that transformers has in memory, to
/// those of parameters, each by itself; and back to the published ones. Tensors that have the
/// shapes already stay. Null where both are the same. A stack without its other half, or that lacks
/// an expert, throws a sentence. One stack at a time is in memory.
StreamChange to_parameter_experts(const std::string& model_type);
StreamChange to_published_experts(const std::string& model_type);

}  // namespace megashard
