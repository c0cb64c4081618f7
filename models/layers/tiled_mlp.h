#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace megashard {

/// body(x) for x [B, T, C] in pieces along T, with one piece's activations in memory at a time (TiledMLP of ROLL and
/// DeepSpeed): saves only x for backward, which recomputes each piece. `body` maps each row independently and gets the
/// same random numbers from the default generators both times. `parameters` are all that it reads; their gradients are
/// summed over the pieces and returned once. At most T pieces; one piece is body(x) itself. No second derivative.
at::Tensor tiled_rows(const std::function<at::Tensor(const at::Tensor&)>& body, const at::Tensor& x,
                      const std::vector<at::Tensor>& parameters, int64_t pieces);

}  // namespace megashard
