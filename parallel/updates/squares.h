#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace megashard {

struct SquaresTable;

/// Sum of the squares of all elements, in fp64 (0-d), of tensors on one device other than the CPU: on the current
/// stream, a launch for up to SquaresTable::kCapacity tensors and one that adds their tiles, in an order that is the
/// same on every GPU, without waiting for the device.
at::Tensor sum_of_squares(const std::vector<at::Tensor>& tensors);

/// The launches that sum_of_squares makes, in order, into sums[0], sums[1], ...; returns how many sums there are.
int64_t make_squares_tables(const std::vector<at::Tensor>& dense, double* sums,
                            const std::function<void(const SquaresTable&)>& launch);

}  // namespace megashard
