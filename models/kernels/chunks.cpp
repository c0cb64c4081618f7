#include "models/kernels/chunks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <vector>

namespace megashard {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

}  // namespace

at::Tensor Chunks::of(const at::Tensor& rows, double behind) const {
  std::vector<int64_t> pad(static_cast<size_t>(2 * (rows.dim() - 1)), 0);
  pad.back() = count_ * kChunk - length_;
  return (pad.back() == 0 ? rows : at::constant_pad_nd(rows, pad, behind)).unflatten(1, {count_, kChunk});
}

at::Tensor Chunks::of_heads(const at::Tensor& rows, int64_t groups) const {
  return of(rows).unflatten(3, {groups, -1}).movedim({3, 4}, {1, 2});
}

at::Tensor Chunks::of_begins(const at::Tensor& begins) const {
  return begins.defined() ? of(begins, static_cast<double>(length_)) : at::Tensor();
}

Decays::Decays(const at::Tensor& of_tokens, const at::Tensor& begins)
    : sums_(of_tokens.cumsum(-2)), forbidden_(at::ones({kChunk, kChunk}, sums_.options().dtype(at::kBool)).triu(1)) {
  const auto last = [](const at::Tensor& x, int64_t dim) { return x.slice(dim, kChunk - 1); };
  auto begin = sums_, end = last(sums_, -2) - sums_, all = last(sums_, -2).transpose(-1, -2);
  if (begins.defined()) {
    const auto documents = begins.unsqueeze(1).unsqueeze(1);  // [B, 1, 1, N, chunk]
    const auto first = at::arange(begins.size(1), begins.options()).mul(kChunk).unsqueeze(-1);
    const auto is_new = documents.ge(first).unsqueeze(-1);  // begins within the chunk
    forbidden_ = forbidden_.logical_or(documents.unsqueeze(-1).ne(documents.unsqueeze(-2)));
    begin = begin.masked_fill(is_new, kNever);
    end = end.masked_fill(documents.ne(last(documents, -1)).unsqueeze(-1), kNever);
    all = all.masked_fill(last(is_new, -2), kNever);
  }
  from_begin = begin.exp();
  to_end = end.exp();
  through = all.exp();
  if (sums_.size(-1) == 1) within_ = (sums_ - sums_.transpose(-1, -2)).masked_fill(forbidden_, kNever).exp();
}

at::Tensor Decays::products(const at::Tensor& x, const at::Tensor& k) const {
  if (within_.defined()) return at::matmul(x, k.transpose(-1, -2)) * within_;
  return by_channel(x, k).masked_fill(forbidden_, 0);
}

/// Halves of a range of tokens are multiplied by way of the first token between them, so that no factor exceeds 1.
at::Tensor Decays::by_channel(const at::Tensor& x, const at::Tensor& k) const {
  auto all = (x * k).sum(-1, /*keepdim=*/true).unsqueeze(-1);  // [..., N, ranges, tokens, tokens]
  for (int64_t half = 1; half < kChunk; half *= 2) {
    const auto ranges = [half](const at::Tensor& each) { return each.unflatten(-2, {-1, 2, half}); };
    const auto before = [&](const at::Tensor& each) { return ranges(each).select(-3, 0); };
    const auto after = [&](const at::Tensor& each) { return ranges(each).select(-3, 1); };
    const auto between = after(sums_).narrow(-2, 0, 1);
    const auto to_token = (after(sums_) - between).exp(), from_token = (between - before(sums_)).exp();
    const auto crossed = at::matmul(after(x) * to_token, (before(k) * from_token).transpose(-1, -2));
    const auto squares = all.unflatten(-3, {-1, 2});
    const auto square = [&](int64_t which) { return squares.select(-3, which).expand_as(crossed); };
    all = at::cat({at::cat({square(0), at::zeros_like(crossed)}, -1), at::cat({crossed, square(1)}, -1)}, -2);
  }
  return all.squeeze(-3);
}

}  // namespace megashard
