#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// Declares weights [out_i, in] that are multiplied by the same input. Call before fully_shard: while their unit is
/// unsharded, the weights are adjacent in memory, so that one product can use them as one matrix. Each stays a
/// parameter with its own name, shard and gradient. Neighbours of the list are adjacent if they share unit, dtype and
/// mesh and the bytes of each but the last are a multiple of 64; no weight is if one rank holds all rows, as nothing is
/// gathered then. A later list that names the same weight replaces the earlier one.
void keep_adjacent(at::TensorList weights);

/// The weights as one matrix [sum of out_i, in], without autograd; use while their unit is unsharded. Undefined if the
/// weights are not adjacent now.
at::Tensor adjacent_matrix(at::TensorList weights);

}  // namespace megashard
