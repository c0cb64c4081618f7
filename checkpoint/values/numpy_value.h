#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "checkpoint/values/value.h"

namespace megashard {

/// Converts a pickled numpy array (numpy.core.multiarray._reconstruct with its state, or _frombuffer of protocol 5) or
/// numpy scalar, as Megatron's checkpoints hold in their random number states, to a CPU tensor of its dtype and sizes;
/// scalars have no dimensions. Returns nullopt for other values and for arrays that tensors cannot hold (big-endian,
/// object, string). Throws if the record holds another number of bytes than its sizes need.
std::optional<at::Tensor> numpy_tensor(const Value& record);

}  // namespace megashard
