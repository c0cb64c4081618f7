#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// Declares weights [out_i, in] that one input is multiplied by, to be called before fully_shard: while their unit is
/// unsharded they lie one after the other in memory, so that one product can take them as one matrix. They stay
/// parameters of their own, each with its name, shard and gradient. Those that follow each other in the list lie so as
/// far as they are of one unit, dtype and mesh and the bytes of all but the last are multiples of 64; none does where
/// one rank holds all rows and nothing is gathered. Of two lists that name a weight the later one counts.
void keep_adjacent(at::TensorList weights);

/// [sum of out_i, in], without autograd, if the weights lie so now: for use while their unit is unsharded. Undefined if
/// not.
at::Tensor adjacent_matrix(at::TensorList weights);

}  // namespace megashard
