#include "models/kernels/delta_rule.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>

#include <cmath>
#include <limits>
#include <vector>

namespace megashard {
namespace {

constexpr int64_t kChunk = 64;  // tokens; transformers' and FLA's
constexpr double kNever = -std::numeric_limits<double>::infinity();

at::Tensor of_length_one(const at::Tensor& x) { return x * (x.square().sum(-1, /*keepdim=*/true) + 1e-6).rsqrt(); }

/// Brings rows into chunks: [B, T, ...] with zeros behind the last token -> [B, N, chunk, ...].
class Chunks {
 public:
  explicit Chunks(int64_t length) : length_(length), count_((length + kChunk - 1) / kChunk) {}

  int64_t count() const { return count_; }
  at::Tensor of(const at::Tensor& rows, double behind = 0) const {
    std::vector<int64_t> pad(static_cast<size_t>(2 * (rows.dim() - 1)), 0);
    pad.back() = count_ * kChunk - length_;
    return (pad.back() == 0 ? rows : at::constant_pad_nd(rows, pad, behind)).unflatten(1, {count_, kChunk});
  }

 private:
  int64_t length_, count_;
};

/// Factors e^(sum of decays) between the tokens of a chunk, and from and to its ends; 0 between documents.
struct Decays {
  at::Tensor within;      // [..., N, chunk, chunk]: from token j to token i >= j
  at::Tensor from_begin;  // [..., N, chunk, 1]
  at::Tensor to_end;      // [..., N, chunk, 1]
  at::Tensor through;     // [..., N, 1, 1]

  /// sums [B, Hk, r, N, chunk]: of the decays up to each token, with its own; begins [B, N, chunk] or undefined
  Decays(const at::Tensor& sums, const at::Tensor& begins) {
    auto forbidden = at::ones({kChunk, kChunk}, sums.options().dtype(at::kBool)).triu(1);
    const auto between = sums.unsqueeze(-1) - sums.unsqueeze(-2);
    auto begin = sums.unsqueeze(-1), end = sums.slice(-1, kChunk - 1) - sums, all = sums.slice(-1, kChunk - 1);
    if (begins.defined()) {
      const auto documents = begins.unsqueeze(1).unsqueeze(1);  // [B, 1, 1, N, chunk]
      const auto first = at::arange(begins.size(1), begins.options()).mul(kChunk).unsqueeze(-1);
      const auto is_new = documents.ge(first);  // begins within the chunk
      const auto last = documents.slice(-1, kChunk - 1);
      forbidden = forbidden.logical_or(documents.unsqueeze(-1).ne(documents.unsqueeze(-2)));
      begin = begin.masked_fill(is_new.unsqueeze(-1), kNever);
      end = end.masked_fill(documents.ne(last), kNever);
      all = all.masked_fill(is_new.slice(-1, kChunk - 1), kNever);
    }
    within = between.masked_fill(forbidden, kNever).exp();
    from_begin = begin.exp();
    to_end = end.unsqueeze(-1).exp();
    through = all.unsqueeze(-1).exp();
  }
};

}  // namespace

at::Tensor gated_delta_rule(const DeltaRuleInputs& x) {
  const int64_t batch = x.v.size(0), length = x.v.size(1), key_heads = x.k.size(2), value_heads = x.v.size(2);
  const int64_t key_dim = x.k.size(3), value_dim = x.v.size(3);
  const Chunks chunks(length);
  const auto heads_first = [&](const at::Tensor& each) {  // [B, T, H, ...] -> [B, Hk, H / Hk, N, chunk, ...]
    const auto cut = chunks.of(each).unflatten(3, {key_heads, -1});
    return cut.movedim({3, 4}, {1, 2});
  };
  const auto q = heads_first(of_length_one(x.q) / std::sqrt(static_cast<double>(key_dim)));
  const auto k = heads_first(of_length_one(x.k));
  const auto v = heads_first(x.v), beta = heads_first(x.beta).unsqueeze(-1);
  const auto begins = x.begins.defined() ? chunks.of(x.begins, static_cast<double>(length)) : at::Tensor();
  const Decays decays(heads_first(x.decay).cumsum(-1), begins);

  // A chunk writes V' - K' S, where S is the state before it. Solves (I + A) [V', K'] = beta [v, e^G k] for V' and K',
  // with A the overlap of the chunk's keys, and G the sum of decays since its begin.
  const auto keys = k.transpose(-1, -2);
  const auto overlap = (at::matmul(k, keys) * decays.within).tril(-1) * beta;
  const auto wanted = at::cat({beta * v, (beta * decays.from_begin) * k}, -1);
  const auto solved = at::linalg_solve_triangular(overlap, wanted, /*upper=*/false, /*left=*/true,
                                                  /*unitriangular=*/true);
  const auto seen = at::matmul(q, keys) * decays.within;
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
