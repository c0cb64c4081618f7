#include "models/kernels/state_space.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <vector>

#include "models/kernels/chunks.h"

namespace megashard {

at::Tensor state_space_scan(const StateSpaceInputs& inputs) {
  const int64_t length = inputs.x.size(1), groups = inputs.b.size(2);
  const Chunks chunks(length);
  const auto values = chunks.of_heads(inputs.x * inputs.step.unsqueeze(-1), groups);  // [B, G, r, N, chunk, P]
  const auto b = chunks.of_heads(inputs.b, groups), c = chunks.of_heads(inputs.c, groups);
  const Decays decays(chunks.of_heads((inputs.step * inputs.rate).unsqueeze(-1), groups),
                      chunks.of_begins(inputs.begins));

  auto results = at::matmul(decays.products(c, b), values);
  if (chunks.count() > 1) {
    // [B, G, r, state, P] of each chunk
    const auto added = at::matmul((b * decays.to_end).transpose(-1, -2), values).unbind(3);
    const auto through = decays.through.unbind(3);
    std::vector<at::Tensor> states{at::zeros_like(added[0])};  // at each chunk's begin
    for (size_t n = 0; n + 1 < added.size(); ++n) states.push_back(states.back() * through[n] + added[n]);
    results = results + at::matmul(c * decays.from_begin, at::stack(states, 3));
  }
  return results.movedim({3, 4}, {1, 2}).flatten(1, 2).flatten(2, 3).narrow(1, 0, length);
}

}  // namespace megashard
