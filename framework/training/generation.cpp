#include "framework/training/generation.h"

#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "framework/modules/keeps_keys.h"
#include "framework/training/text_rows.h"
#include "parallel/fsdp/fsdp_controls.h"

namespace megashard {
namespace {

/// The logits [B, V] at `place` [B] of each sequence, from those of this rank's rows [B, rows(), V].
at::Tensor logits_at(const at::Tensor& logits, const at::Tensor& place, const SequenceShard& shard) {
  const at::Tensor row_numbers = at::arange(logits.size(0), place.options());
  if (shard.is_whole()) return logits.index({row_numbers, place});
  // The rank that has the place gives its logits, the others 0.
  at::Tensor here = at::zeros({logits.size(0), logits.size(2)}, logits.options());
  if (logits.size(1) > 0) {
    const at::Tensor places_here = shard.rows_of(at::arange(shard.length, place.options()), 0);
    const at::Tensor is_here = places_here.unsqueeze(0) == place.unsqueeze(1);  // [B, rows()]
    const at::Tensor found = logits.index({row_numbers, is_here.to(at::kLong).argmax(1)});
    here = at::where(is_here.any(1).unsqueeze(1), found, here);
  }
  shard.group->all_reduce(here, ReduceOp::kSum).wait();
  return here;
}

/// Combines a number [] int64 over the ranks.
int64_t over_ranks(at::Tensor number, ReduceOp operation, const InferenceRanks& ranks) {
  if (ranks.all && ranks.all->size() > 1) ranks.all->all_reduce(number, operation).wait();
  return number.item<int64_t>();
}

/// The model's kept keys, which end with it.
class KeptKeys {
 public:
  KeptKeys(MultiModalModule& model, int64_t capacity) : model_(dynamic_cast<KeepsKeys&>(model)) {
    model_.keep_keys(capacity);
  }
  ~KeptKeys() { model_.drop_keys(); }
  KeptKeys(const KeptKeys&) = delete;
  KeptKeys& operator=(const KeptKeys&) = delete;

 private:
  KeepsKeys& model_;
};

class Generation {
 public:
  Generation(MultiModalModule& model, const InferenceBatch& batch, const std::vector<TextNumber>& numbers,
             const GenerationOptions& options, const InferenceRanks& ranks)
      : model_(model), batch_(batch), numbers_(numbers), options_(options), ranks_(ranks) {
    at_end_ = text_lengths(batch.texts).to(ranks.device);
    longest_ = at_end_.max().item<int64_t>();
    given_ = padded_texts(batch.texts, length_for(longest_ + options.max_new_tokens, ranks));
    rows_ = given_.to(ranks.device, given_.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    // A row that stands for no text has ended.
    ended_ = at::arange(rows_.size(0), at_end_.options()) >= static_cast<int64_t>(batch.texts.size());
    lengths_ = at::zeros_like(at_end_);
    if (why_recomputed(model, ranks).empty()) kept_.emplace(model, longest_ + options.max_new_tokens);
  }

  Generated run() {
    const at::Tensor ends = at::tensor(options_.ends, at::kLong).to(ranks_.device);
    const at::Tensor row_numbers = at::arange(rows_.size(0), at_end_.options());
    std::vector<at::Tensor> tokens, log_probs;
    for (int64_t step = 0; step < options_.max_new_tokens && !(step > 0 && all_ended()); ++step) {
      const auto [drawn, log_prob] = sample_tokens(next_logits(step), uniform_numbers(step), options_.sampling);
      const at::Tensor next = step == 0 ? drawn : at::where(ended_, tokens.back(), drawn);
      log_probs.push_back(log_prob.masked_fill(ended_, 0));
      lengths_ += ended_.logical_not();
      ended_ = ended_.logical_or(at::isin(next, ends));
      rows_.index_put_({row_numbers, at_end_}, next);
      at_end_ = at_end_ + 1;
      tokens.push_back(next);
    }
    const auto texts = static_cast<int64_t>(batch_.texts.size());
    const int64_t missing = options_.max_new_tokens - std::ssize(tokens);
    const auto on_cpu = [&](std::vector<at::Tensor> columns, const at::Tensor& behind) {
      columns.insert(columns.end(), static_cast<size_t>(missing), behind);
      return at::stack(columns, 1).cpu().narrow(0, 0, texts);
    };
    return {on_cpu(tokens, tokens.back()), on_cpu(log_probs, at::zeros_like(log_probs.back())),
            lengths_.cpu().narrow(0, 0, texts)};
  }

 private:
  at::Tensor logits_of(Batch input) {
    ModelOutput output = model_(std::move(input));
    TORCH_CHECK(output.logits.defined(), "the head of ", model_.class_name(),
                " is `score`, which continues no text; give the files of a language model");
    return std::move(output.logits);
  }

  /// The logits [B, V] of the token behind each row.
  at::Tensor next_logits(int64_t step) {
    if (kept_ && step > 0) {
      Batch input;
      const at::Tensor last = (at_end_ - 1).unsqueeze(1);
      input.set(kTokens, rows_.gather(1, last));
      input.set(kPositionIds, last);
      input.sequence = ranks_.sequence.with_length(1);
      return logits_of(std::move(input)).select(1, 0);
    }
    // Tokens behind a row's end are seen by no token before them. Pictures have their places in what was given,
    // whatever the model says.
    const int64_t used = longest_ + step, taken = length_for(used, ranks_);
    Batch input = input_of_rows(model_, given_.narrow(1, 0, taken).contiguous(), used, batch_.items, ranks_);
    const SequenceShard shard = input.sequence;
    input.set(kTokens, shard.rows_of(rows_.narrow(1, 0, taken), 1).contiguous());
    return logits_at(logits_of(std::move(input)), at_end_ - 1, shard);
  }

  at::Tensor uniform_numbers(int64_t step) const {
    if (options_.sampling.temperature == 0) return {};
    at::Tensor numbers = at::zeros({rows_.size(0)}, at::kDouble);
    for (size_t i = 0; i < batch_.texts.size(); ++i) {
      const int64_t place = static_cast<int64_t>(batch_.texts[i].size()) + step;
      numbers.mutable_data_ptr<double>()[i] = uniform_number(options_.seed, numbers_.at(i), place);
    }
    return numbers.to(ranks_.device);
  }

  bool all_ended() const {
    if (options_.ends.empty()) return false;
    return over_ranks(ended_.logical_not().sum(), ReduceOp::kSum, ranks_) == 0;
  }

  MultiModalModule& model_;
  const InferenceBatch& batch_;
  const std::vector<TextNumber>& numbers_;
  const GenerationOptions& options_;
  const InferenceRanks& ranks_;
  std::optional<KeptKeys> kept_;  // unset: each token takes a forward of the whole text
  int64_t longest_;
  at::Tensor given_;  // the texts, on the CPU
  at::Tensor rows_;   // with what follows them
  at::Tensor at_end_, ended_, lengths_;
};

/// Each text alone, as often on every rank.
Generated generate_alone(MultiModalModule& model, const TokenLists& texts, const std::vector<TextNumber>& numbers,
                         const GenerationOptions& options, const InferenceRanks& ranks) {
  const auto longs = at::TensorOptions(at::kLong).device(ranks.device);
  const int64_t most = over_ranks(at::full({}, std::ssize(texts), longs), ReduceOp::kMax, ranks);
  std::vector<at::Tensor> tokens, log_probs, lengths;
  for (int64_t i = 0; i < most; ++i) {
    const auto index = static_cast<size_t>(i);
    const bool is_here = index < texts.size();
    InferenceBatch one;
    if (is_here) one.texts = {texts[index]};
    const auto own = is_here && !numbers.empty() ? std::vector{numbers.at(index)} : std::vector<TextNumber>();
    const Generated result = Generation(model, one, own, options, ranks).run();
    tokens.push_back(result.tokens);
    log_probs.push_back(result.log_probs);
    lengths.push_back(result.lengths);
  }
  if (tokens.empty()) return Generation(model, {}, {}, options, ranks).run();
  return {at::cat(tokens), at::cat(log_probs), at::cat(lengths)};
}

}  // namespace

std::string why_recomputed(const MultiModalModule& model, const InferenceRanks& ranks) {
  const auto* keeps = dynamic_cast<const KeepsKeys*>(&model);
  if (keeps == nullptr) return "the model keeps no keys and values";
  if (!ranks.sequence.is_whole()) return "ranks share each text";
  const std::string why = keeps->why_no_keys();
  return why.empty() ? why : "the model keeps no keys and values: " + why;
}

Generated generate(MultiModalModule& model, const InferenceBatch& batch, const std::vector<TextNumber>& numbers,
                   const GenerationOptions& options, const InferenceRanks& ranks) {
  const c10::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(options.max_new_tokens > 0);
  const auto* keeps = dynamic_cast<const KeepsKeys*>(&model);
  Generated result;
  run_unsharded(model, [&] {
    result = keeps != nullptr && keeps->turns_by_length() ? generate_alone(model, batch.texts, numbers, options, ranks)
                                                          : Generation(model, batch, numbers, options, ranks).run();
  });
  return result;
}

}  // namespace megashard
