#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace megashard {

/// How many of `rows` go to each expert, for the host, which waits for them. A plan has no values: there each expert
/// gets as many as any other.
std::vector<int64_t> counts_on_host(const at::Tensor& counts, int64_t rows);

}  // namespace megashard
