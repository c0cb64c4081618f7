#include "models/kernels/delta_rule.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>

#include <cmath>
#include <vector>

#include "models/kernels/chunks.h"

namespace megashard {
namespace {

at::Tensor of_length_one(const at::Tensor& x) { return x * (x.square().sum(-1, /*keepdim=*/true) + 1e-6).rsqrt(); }

}  // namespace

at::Tensor gated_delta_rule(const DeltaRuleInputs& x) {
  const int64_t batch = x.v.size(0), length = x.v.size(1), key_heads = x.k.size(2), value_heads = x.v.size(2);
  const int64_t key_dim = x.k.size(3), value_dim = x.v.size(3);
  const Chunks chunks(length);
  const auto heads_first = [&](const at::Tensor& each) { return chunks.of_heads(each, key_heads); };
  const auto q = heads_first(of_length_one(x.q) / std::sqrt(static_cast<double>(key_dim)));
  const auto k = heads_first(of_length_one(x.k));
  const auto v = heads_first(x.v), beta = heads_first(x.beta).unsqueeze(-1);
  const Decays decays(heads_first(x.decay.dim() == 3 ? x.decay.unsqueeze(-1) : x.decay), chunks.of_begins(x.begins));

  // A chunk writes V' - K' S, where S is the state before it. Solves (I + A) [V', K'] = beta [v, e^G k] for V' and K',
  // with A the overlap of the chunk's keys, and G the sum of decays since its begin.
  const auto overlap = decays.products(k, k).tril(-1) * beta;
  const auto wanted = at::cat({beta * v, (beta * decays.from_begin) * k}, -1);
  const auto solved = at::linalg_solve_triangular(overlap, wanted, /*upper=*/false, /*left=*/true,
                                                  /*unitriangular=*/true);
  const auto seen = decays.products(q, k);
  const auto from_state = q * decays.from_begin, to_state = (k * decays.to_end).transpose(-1, -2);

  at::Tensor state;  // [B, Hk, r, Dk, Dv]; undefined: zero
  std::vector<at::Tensor> results;
  for (int64_t n = 0; n < chunks.count(); ++n) {
    const auto of_chunk = [n](const at::Tensor& each) { return each.select(3, n); };
    const auto both = of_chunk(solved);
    auto written = both.narrow(-1, 0, value_dim);
    if (state.defined()) written = written - at::matmul(both.narrow(-1, value_dim, key_dim), state);
    auto result = at::matmul(of_chunk(seen), written);
    if (state.defined()) result = result + at::matmul(of_chunk(from_state), state);
    results.push_back(result);
    if (n + 1 == chunks.count()) break;
    const auto added = at::matmul(of_chunk(to_state), written);
    state = state.defined() ? state * of_chunk(decays.through) + added : added;
  }
  const auto all = at::stack(results, 1);  // [B, N, Hk, r, chunk, Dv]
  return all.permute({0, 1, 4, 2, 3, 5}).reshape({batch, -1, value_heads, value_dim}).narrow(1, 0, length);
}

}  // namespace megashard
