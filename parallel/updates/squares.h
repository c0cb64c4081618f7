#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace megashard {

struct SquaresTable;

/// Sum of squares of all elements, in fp64 (0-d), for tensors on one device other than the CPU. Asynchronous on the
/// current stream: one launch per SquaresTable::kCapacity tensors, then one that adds up the tiles, in the same order
/// on every GPU.
at::Tensor sum_of_squares(const std::vector<at::Tensor>& tensors);

/// Calls `launch` with the tables of sum_of_squares's launches, in order; they write sums[0], sums[1], ... Returns the
/// number of sums.
int64_t make_squares_tables(const std::vector<at::Tensor>& dense, double* sums,
                            const std::function<void(const SquaresTable&)>& launch);

}  // namespace megashard
