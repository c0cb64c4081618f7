#include "framework/training/inference.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "framework/training/parallel_groups.h"

namespace megashard {
namespace {

/// The texts as rows of one tensor, filled up with token 0; one row of it when there are none, so
/// that a rank without texts runs the same gathers.
at::Tensor padded(const TokenLists& texts, int64_t length) {
  at::Tensor rows = at::zeros({std::max<int64_t>(1, static_cast<int64_t>(texts.size())), length}, at::kLong);
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto size = static_cast<int64_t>(texts[i].size());
    TORCH_CHECK(size >= 1 && size <= length, "a text has ", size, " tokens; it must have 1 to ", length);
    std::copy(texts[i].begin(), texts[i].end(), rows[static_cast<int64_t>(i)].mutable_data_ptr<int64_t>());
  }
  return rows;
}

at::Tensor lengths_of(const TokenLists& texts) {
  std::vector<int64_t> lengths;
  for (const auto& text : texts) lengths.push_back(static_cast<int64_t>(text.size()));
  if (lengths.empty()) lengths.push_back(1);
  return at::tensor(lengths, at::kLong);
}

/// `used`: the tokens of the longest text. What is filled up behind them has the last one's position, since a model's
/// positions may turn by the sequence's length.
Batch input_of_rows(const MultiModalModule& model, const at::Tensor& rows, int64_t used, Batch items,
                    const InferenceRanks& ranks) {
  Batch whole = std::move(items);
  whole.set(kTokens, rows);
  if (used < rows.size(1))
    whole.set(kPositionIds, at::arange(rows.size(1), at::kLong).clamp_max(used - 1).expand(rows.sizes()).contiguous());
  whole.sequence = ranks.sequence.with_length(rows.size(1));
  return rows_of_rank(to_device(model.prepared(std::move(whole)), ranks.device));
}

/// The length with which the ranks take so many tokens: some of them want a multiple. No token sees what is filled up
/// behind it.
int64_t length_for(int64_t tokens, const InferenceRanks& ranks) {
  const int64_t multiple = ranks.sequence.length_multiple();
  return (tokens + multiple - 1) / multiple * multiple;
}

/// The likeliest token at `place` [B] of each sequence, from logits [B, rows(), V].
at::Tensor likeliest_at(const at::Tensor& logits, const at::Tensor& place, const SequenceShard& shard) {
  const at::Tensor row_numbers = at::arange(logits.size(0), place.options());
  if (shard.is_whole()) return logits.index({row_numbers, place}).argmax(-1);
  // The rank that has the place gives its token, the others 0.
  at::Tensor token = at::zeros_like(place);
  if (logits.size(1) > 0) {
    const at::Tensor places_here = shard.rows_of(at::arange(shard.length, place.options()), 0);
    const at::Tensor is_here = places_here.unsqueeze(0) == place.unsqueeze(1);  // [B, rows()]
    const at::Tensor row = is_here.to(at::kLong).argmax(1);
    token = logits.index({row_numbers, row}).argmax(-1) * is_here.any(1);
  }
  shard.group->all_reduce(token, ReduceOp::kSum).wait();
  return token;
}

}  // namespace

at::Tensor log_probabilities(MultiModalModule& model, InferenceBatch batch, int64_t length,
                             const InferenceRanks& ranks) {
  const c10::NoGradGuard no_grad;
  const at::Tensor lengths = lengths_of(batch.texts);
  // As long as the texts and no longer: a model's positions may turn by the sequence's length.
  const int64_t longest = lengths.max().item<int64_t>();
  const int64_t used = std::min(longest, length);  // the last token of a text is not an input
  const int64_t taken = length_for(used, ranks);
  const at::Tensor rows = at::constant_pad_nd(padded(batch.texts, longest), {0, taken + 1 - longest});
  Batch input = input_of_rows(model, rows.narrow(1, 0, taken).contiguous(), used, std::move(batch.items), ranks);
  const SequenceShard shard = input.sequence;
  input.set(kLabels, shard.rows_of(rows.narrow(1, 1, taken).to(ranks.device), 1).contiguous());
  const at::Tensor losses = whole_of_rows(model(std::move(input)).token_losses, 1, shard).cpu();
  const at::Tensor wanted = at::arange(1, taken + 1).unsqueeze(0) < lengths.unsqueeze(1);
  const at::Tensor found = at::where(wanted, losses.neg(), at::zeros({}, losses.options()));
  // The last token of a text has no successor.
  return at::constant_pad_nd(found, {0, length - taken}).narrow(0, 0, static_cast<int64_t>(batch.texts.size()));
}

at::Tensor greedy_continuations(MultiModalModule& model, const InferenceBatch& batch, int64_t count,
                                const std::vector<int64_t>& ends, const InferenceRanks& ranks) {
  const c10::NoGradGuard no_grad;
  const auto texts = static_cast<int64_t>(batch.texts.size());
  if (count == 0) return at::zeros({texts, 0}, at::kLong);
  at::Tensor at_end = lengths_of(batch.texts).to(ranks.device);  // where each row goes on
  const int64_t longest = at_end.max().item<int64_t>();
  const at::Tensor given = padded(batch.texts, length_for(longest + count, ranks));
  const at::Tensor rows = given.to(ranks.device, given.scalar_type(), false, /*copy=*/true);
  const at::Tensor row_numbers = at::arange(rows.size(0), at_end.options());
  const at::Tensor marks = at::tensor(ends, at::kLong).to(ranks.device);
  at::Tensor ended = at::zeros({rows.size(0)}, at_end.options().dtype(at::kBool));
  std::vector<at::Tensor> chosen;
  for (int64_t step = 0; step < count; ++step) {
    // Tokens behind a row's end are seen by no token before them. Pictures have their places in
    // what was given, whatever the model says.
    const int64_t used = longest + step, taken = length_for(used, ranks);
    Batch input = input_of_rows(model, given.narrow(1, 0, taken).contiguous(), used, batch.items, ranks);
    const SequenceShard shard = input.sequence;
    input.set(kTokens, shard.rows_of(rows.narrow(1, 0, taken), 1).contiguous());
    at::Tensor next = likeliest_at(model(std::move(input)).logits, at_end - 1, shard);
    if (step > 0) next = at::where(ended, chosen.back(), next);
    ended = ended.logical_or(at::isin(next, marks));
    rows.index_put_({row_numbers, at_end}, next);
    at_end = at_end + 1;
    chosen.push_back(next);
  }
  return at::stack(chosen, 1).cpu().narrow(0, 0, texts);
}

}  // namespace megashard
