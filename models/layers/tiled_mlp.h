#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace megashard {

/// body(x) for x [B, T, C] in pieces of T, of which one's activations exist at a time (TiledMLP of
/// ROLL and DeepSpeed): nothing but x is kept for backward, which computes each piece again.
/// `body` maps each row by itself, with the same numbers from the default generators both times;
/// `parameters`: all that it reads, whose gradients are summed over the pieces and handed over
/// once. At most T pieces; one is body(x) itself. No second derivative.
at::Tensor tiled_rows(const std::function<at::Tensor(const at::Tensor&)>& body, const at::Tensor& x,
                      const std::vector<at::Tensor>& parameters, int64_t pieces);

}  // namespace megashard
