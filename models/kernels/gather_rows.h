#pragma once

#include "parallel/sharded_tensor.h"

namespace megashard {

/// The whole of a matrix that is cut along dimension 0, on every rank that shares it; without such
/// ranks the piece itself. Collective over them; throws for another cut.
at::Tensor gather_rows(const ShardedTensor& piece);

}  // namespace megashard
