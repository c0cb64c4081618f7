#include "framework/training/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <tuple>

namespace megashard {

at::Tensor cut_scores(const at::Tensor& scores, const SamplingOptions& options) {
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  const int64_t vocabulary = scores.size(-1);
  auto kept = scores;
  if (options.top_k > 0 && options.top_k < vocabulary) {
    const auto best = std::get<0>(at::topk(kept, options.top_k));
    kept = kept.masked_fill(kept.lt(best.narrow(-1, options.top_k - 1, 1)), kNever);
  }
  if (options.top_p < 1) {
    const auto [sorted, order] = at::sort(kept);  // the likeliest last
    const auto cut = at::softmax(sorted, -1).cumsum(-1).le(1 - options.top_p);
    cut.narrow(-1, vocabulary - 1, 1).zero_();
    kept = kept.masked_fill(at::empty_like(cut).scatter_(-1, order, cut), kNever);
  }
  return kept;
}

SampledTokens sample_tokens(const at::Tensor& logits, const at::Tensor& uniform, const SamplingOptions& options) {
  const bool greedy = options.temperature == 0;
  const auto scores = greedy ? logits.to(at::kFloat) : logits.to(at::kFloat) / options.temperature;
  at::Tensor tokens;
  if (greedy) {
    tokens = scores.argmax(-1);
  } else {
    const auto sums = at::softmax(cut_scores(scores, options), -1, at::kDouble).cumsum(-1);
    const auto wanted = uniform.unsqueeze(1) * sums.narrow(-1, -1, 1);
    tokens = at::searchsorted(sums, wanted, /*out_int32=*/false, /*right=*/true).squeeze(1);
  }
  return {tokens, at::log_softmax(scores, -1).gather(1, tokens.unsqueeze(1)).squeeze(1)};
}

double uniform_number(int64_t seed, const TextNumber& text, int64_t place) {
  constexpr int kSampleBits = 24;
  TORCH_CHECK(text.sample >> kSampleBits == 0, "a prompt has at most ", 1 << kSampleBits, " samples");
  const auto sequence = static_cast<uint64_t>(text.prompt) << kSampleBits | static_cast<uint64_t>(text.sample);
  at::Philox4_32 numbers(static_cast<uint64_t>(seed), sequence, static_cast<uint64_t>(place));
  return std::ldexp(static_cast<double>(numbers()), -32);
}

}  // namespace megashard
