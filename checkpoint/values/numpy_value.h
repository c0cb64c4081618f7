#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "checkpoint/values/value.h"

namespace megashard {

/// What a record of a numpy array (numpy.core.multiarray._reconstruct with its state, or
/// _frombuffer of protocol 5) or of a numpy scalar stands for, as the random number states of
/// Megatron's checkpoints hold them: a CPU tensor of its dtype and sizes, without dimensions for
/// scalars. Nothing for other values, and for arrays that tensors cannot hold (big-endian, object,
/// string). Throws when the record announces another number of bytes than it holds.
std::optional<at::Tensor> numpy_tensor(const Value& record);

}  // namespace megashard
