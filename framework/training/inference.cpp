#include "framework/training/inference.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "framework/training/text_rows.h"

namespace megashard {

at::Tensor log_probabilities(MultiModalModule& model, InferenceBatch batch, int64_t length,
                             const InferenceRanks& ranks) {
  const c10::NoGradGuard no_grad;
  const at::Tensor lengths = text_lengths(batch.texts);
  // As long as the texts and no longer: a model's positions may turn by the sequence's length.
  const int64_t longest = lengths.max().item<int64_t>();
  const int64_t used = std::min(longest, length);  // the last token of a text is not an input
  const int64_t taken = length_for(used, ranks);
  const at::Tensor rows = at::constant_pad_nd(padded_texts(batch.texts, longest), {0, taken + 1 - longest});
  Batch input = input_of_rows(model, rows.narrow(1, 0, taken).contiguous(), used, std::move(batch.items), ranks);
  const SequenceShard shard = input.sequence;
  input.set(kLabels, shard.rows_of(rows.narrow(1, 1, taken).to(ranks.device), 1).contiguous());
  const at::Tensor own = model(std::move(input)).token_losses;
  TORCH_CHECK(own.defined(), "the head of ", model.class_name(),
              " is `score`, which gives no log-probabilities; give --scores FILE.npy");
  const at::Tensor losses = whole_of_rows(own, 1, shard).cpu();
  const at::Tensor wanted = at::arange(1, taken + 1).unsqueeze(0) < lengths.unsqueeze(1);
  const at::Tensor found = at::where(wanted, losses.neg(), at::zeros({}, losses.options()));
  // The last token of a text has no successor.
  return at::constant_pad_nd(found, {0, length - taken}).narrow(0, 0, static_cast<int64_t>(batch.texts.size()));
}

at::Tensor scores(MultiModalModule& model, InferenceBatch batch, const InferenceRanks& ranks) {
  const c10::NoGradGuard no_grad;
  const at::Tensor lengths = text_lengths(batch.texts);
  const int64_t longest = lengths.max().item<int64_t>();
  Batch input = input_of_rows(model, padded_texts(batch.texts, length_for(longest, ranks)), longest,
                              std::move(batch.items), ranks);
  const SequenceShard shard = input.sequence;
  const at::Tensor own = model(std::move(input)).values;
  TORCH_CHECK(own.defined(), model.class_name(),
              " has no head `score`, of which --scores are: give the files of a reward model");
  const at::Tensor values = whole_of_rows(own, 1, shard).cpu();
  return values.gather(1, (lengths - 1).unsqueeze(1)).narrow(0, 0, static_cast<int64_t>(batch.texts.size()));
}

}  // namespace megashard
