#include "framework/training/train_step.h"

#include <ATen/Functions.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "framework/diagnostics.h"
#include "framework/mistakes.h"
#include "framework/objectives/sequences.h"
#include "framework/training/parallel_groups.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

bool has_replicas(const torch::nn::Module& model) {
  for (const auto& parameter : model.parameters()) {
    const auto view = reshard_and_view(parameter);
    const bool has_several_dims = !view.is_replicated() && view.mesh->ndim() > 1;
    if (has_several_dims && view.placements[0] == Placement::replicate() && view.mesh->size(0) > 1) return true;
  }
  return false;
}

}  // namespace

TrainStep::TrainStep(MultiModalModule& model, const Objective& objective, Optimizer& optimizer, ProcessGroupPtr group,
                     c10::Device device, const TrainStepOptions& options)
    : model_(model),
      objective_(objective),
      optimizer_(optimizer),
      replicated_(replicated_parameters(optimizer.parameters())),
      group_(std::move(group)),
      device_(device),
      options_(options),
      columns_(objective.columns()),
      needs_(objective.needs()),
      needs_sequences_(std::ranges::count(columns_, kLabelCounts) > 0),
      needs_reference_(std::ranges::count(columns_, kRefLogProbs) > 0),
      has_replicas_(has_replicas(model)) {
  for (const auto& module : model_.modules(/*include_self=*/false)) {
    if (auto* ends = dynamic_cast<EndsSteps*>(module.get())) ends_.push_back(ends);
    auto* adapted = dynamic_cast<HasAdapters*>(module.get());
    if (adapted != nullptr && adapted->has_adapters()) adapters_.push_back(adapted);
  }
}

void TrainStep::empty_unused_memory(int64_t from_level) {
  if (device_.is_cpu() || options_.empty_unused_memory_level < from_level) return;
  c10::getDeviceAllocator(device_.type())->emptyCache();
}

Batch TrainStep::with_sequences(Batch batch) const {
  if (needs_sequences_) add_sequences(batch);
  if (metric_names_.empty()) {
    for (const std::string& name : columns_)
      require(
          batch.find(name).defined() || (name == kRefLogProbs && (options_.reference != nullptr || !adapters_.empty())),
          "the data have no column \"" + name + "\", which --objective needs (docs/objectives.md).");
    require(options_.reference == nullptr || !batch.find(kRefLogProbs).defined(),
            "the data have the column ref_log_probs already; leave out --ref-model, or the column.");
  }
  return batch;
}

Batch TrainStep::on_device(Batch batch) {
  batch = with_sequences(std::move(batch));
  batch.sequence = options_.sequence.with_length(batch.length());
  Batch whole = to_device(model_.prepared(std::move(batch)), device_);
  if (!needs_reference_ || whole.find(kRefLogProbs).defined()) return whole;
  const bool is_base = options_.reference == nullptr;
  for (HasAdapters* each : adapters_) each->use_adapters(!is_base);
  whole.set(kRefLogProbs, -token_losses_of(is_base ? model_ : *options_.reference, {whole}), Axis::kToken,
            /*is_input=*/false);
  for (HasAdapters* each : adapters_) each->use_adapters(true);
  return whole;
}

at::Tensor TrainStep::token_losses_of(MultiModalModule& model, const std::vector<Batch>& wholes) {
  const c10::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  int64_t length = 0;
  std::vector<at::Tensor> losses;
  for (const Batch& each : wholes) length = std::max(length, each.length());
  for (const Batch& each : wholes) {
    const at::Tensor own = whole_of_rows(model(rows_of_rank(each)).token_losses, 1, each.sequence);
    losses.push_back(at::constant_pad_nd(own, {0, length - own.size(1)}));
  }
  model.train(was_training);
  return at::cat(losses);
}

at::Tensor TrainStep::global_scale(const std::vector<Batch>& micro_batches) {
  if (!options_.calculate_per_token_loss && !objective_.is_over_global_batch()) return {};
  at::Tensor terms;
  for (size_t i = 0; i < micro_batches.size(); i += together()) {
    auto parts = parts_from(micro_batches, i);
    for (Batch& each : parts) each = with_sequences(std::move(each));
    const at::Tensor count = objective_.count(joined(std::move(parts))).to(at::kDouble);
    terms = terms.defined() ? terms + count : count;
  }
  terms = terms.to(device_).view({-1}).contiguous();
  group_->all_reduce(terms, ReduceOp::kSum).wait();
  // fully_shard averages over the ranks, and the mean over all terms needs the sum. Every rank of a sequence has
  // counted its terms.
  const at::Tensor scale = (group_->size() * sequence_ranks() / terms.clamp_min(1.0)).to(at::kFloat);
  return scale.size(0) == 1 ? scale[0] : scale;
}

at::Tensor TrainStep::factor_of(const at::Tensor& count, const Scale& scale) const {
  return scale.global.defined() ? scale.global : sequence_ranks() / scale.micro_batches / count.clamp_min(1);
}

at::Tensor TrainStep::scaled(const at::Tensor& loss) const {
  return options_.scaler == nullptr ? loss : loss * options_.scaler->scale_tensor();
}

ModelOutput TrainStep::output_for(const Batch& mine) {
  Batch input = mine;
  input.asked = needs_.asked;
  ModelOutput output = model_(std::move(input));
  const auto must_have = [&](const at::Tensor& numbers, const char* what) {
    TORCH_CHECK(numbers.defined(), model_.class_name(), " returned no ", what, ", which the objective needs");
  };
  if (needs_.values) {
    must_have(output.values, "values");
    return output;
  }
  TORCH_CHECK(!output.values.defined(), model_.class_name(),
              " has the head `score` in place of lm_head: give --objective reward or value, or the files of a language "
              "model; a model of --model-plugin needs the objective that takes its values");
  must_have(output.token_losses, "token_losses for a batch with labels");
  if (needs_.asked.entropies) must_have(output.entropies, "entropies");
  if (needs_.asked.teacher_log_probs) must_have(output.teacher_log_probs, "teacher_log_probs");
  return output;
}

std::pair<at::Tensor, std::vector<MetricSum>> TrainStep::loss_of(const ModelOutput& output, const Batch& mine,
                                                                 const at::Tensor& count, const at::Tensor& factor,
                                                                 const Scale& scale) const {
  Loss loss = objective_({.token_losses = output.token_losses,
                          .batch = mine,
                          .mean_over_ranks =
                              [&](at::Tensor value) {
                                value = value.clone();
                                group_->all_reduce(value, ReduceOp::kSum).wait();
                                return value / group_->size();
                              },
                          .values = output.values,
                          .entropies = output.entropies,
                          .teacher_log_probs = output.teacher_log_probs});
  at::Tensor total = (loss.sum * factor).sum();
  if (count.dim() > 0) {
    MetricSum& first = loss.metrics.front();
    first.sum = total.detach().to(at::kDouble) / (mine.sequence.is_whole() ? sequence_ranks() : 1);
    first.count = at::full_like(first.sum, 1 / scale.micro_batches);
  }
  return {std::move(total), std::move(loss.metrics)};
}

std::vector<Batch> TrainStep::parts_from(const std::vector<Batch>& micro_batches, size_t first) const {
  const auto begin = micro_batches.begin() + static_cast<std::ptrdiff_t>(first);
  return {begin, begin + static_cast<std::ptrdiff_t>(together())};
}

Batch TrainStep::joined(std::vector<Batch> parts) {
  Batch all = parts.size() == 1 ? std::move(parts.front()) : concatenate(std::move(parts), /*pin_memory=*/false);
  all.sequence = {};  // every rank that shares the sequences computes the same
  return all;
}

TrainStep::LossAhead TrainStep::loss_ahead(const std::vector<Batch>& parts, const Scale& scale) {
  const at::Tensor all = token_losses_of(model_, parts).detach().requires_grad_();
  const Batch batch = joined(parts);
  LossAhead ahead{.weights = {}, .count = objective_.count(batch), .metrics = {}};
  at::Tensor total;
  std::tie(total, ahead.metrics) =
      loss_of({.token_losses = all}, batch, ahead.count, factor_of(ahead.count, scale), scale);
  scaled(total).backward();
  int64_t row = 0;
  for (const Batch& part : parts) {
    ahead.weights.push_back(all.grad().narrow(0, row, part.rows()).narrow(1, 0, part.length()));
    row += part.rows();
  }
  return ahead;
}

std::vector<MetricSum> TrainStep::forward_backward(Batch whole, const Scale& scale, const LossAhead* ahead,
                                                   size_t part) {
  const at::Tensor count = ahead == nullptr ? objective_.count(whole) : ahead->count;
  const at::Tensor factor = factor_of(count, scale);
  std::vector<MetricSum> metrics;
  at::Tensor weights = objective_.weights(whole), total;
  const bool counts_tokens = weights.defined();
  {
    const TimedPart forward(options_.timers, StepPart::kForward);
    if (counts_tokens) {
      weights = scaled(weights * factor);
    } else if (ahead != nullptr) {
      weights = ahead->weights[part];
      metrics = ahead->metrics;
      if (part > 0) {
        for (MetricSum& each : metrics) each.sum = each.count = at::zeros_like(each.sum);
      }
    }
    if (weights.defined()) whole.set(kLossWeights, weights, Axis::kToken, /*is_input=*/false);
    const Batch mine = rows_of_rank(std::move(whole));
    const ModelOutput output = output_for(mine);
    if (metrics.empty()) std::tie(total, metrics) = loss_of(output, mine, count, factor, scale);
    // A model that has made the head's gradients in forward returns the sum that they are of.
    if (output.weighted_loss.defined()) {
      total = output.weighted_loss;
    } else {
      total = total.defined() ? scaled(total) : (output.token_losses * mine.at(kLossWeights)).sum();
    }
    if (!output.aux.empty()) {
      const at::Tensor terms = count.view({-1})[0];
      const double parts = ahead == nullptr ? 1 : static_cast<double>(ahead->weights.size());
      const at::Tensor share = counts_tokens ? mine.at(kLossWeights).contiguous().sum()
                                             : scaled(factor.view({-1})[0] * terms / (sequence_ranks() * parts));
      const at::Tensor one = at::ones({}, at::TensorOptions(at::kDouble).device(device_));
      for (const AuxTerm& term : output.aux) {
        const bool by_tokens = scale.global.defined() && term.tokens.defined();
        total = total + term.value * (by_tokens ? share * (term.tokens * parts / terms.clamp_min(1)) : share);
        metrics.push_back({.name = term.name, .sum = term.metric.to(at::kDouble), .count = one});
      }
    }
  }
  const TimedPart backward(options_.timers, StepPart::kBackward);
  total.backward();
  return metrics;
}

at::Tensor TrainStep::sums_of(const std::vector<MetricSum>& metrics) {
  metric_names_.clear();
  std::vector<at::Tensor> sums;
  for (const MetricSum& metric : metrics) {
    metric_names_.push_back(metric.name);
    sums.insert(sums.end(), {metric.sum, metric.count});
  }
  return at::stack(sums);
}

at::Tensor TrainStep::backward(const std::vector<Batch>& micro_batches) {
  optimizer_.zero_grad();
  const TimedPart timed(options_.timers, StepPart::kForwardBackward);
  const double terms = static_cast<double>(micro_batches.size()) / static_cast<double>(together());
  const Scale scale{.global = global_scale(micro_batches), .micro_batches = terms};
  std::vector<at::Tensor> sums;
  std::vector<Batch> parts;
  std::optional<LossAhead> ahead;
  for (size_t i = 0; i < micro_batches.size(); ++i) {
    const size_t part = i % together();
    if (options_.loss_by_weights && part == 0) {
      parts.clear();
      for (Batch& each : parts_from(micro_batches, i)) parts.push_back(on_device(std::move(each)));
      ahead = loss_ahead(parts, scale);
    }
    const bool last = i + 1 == micro_batches.size();
    if (!options_.reduces_each_microbatch) set_requires_gradient_sync(model_, last);
    if (has_replicas_) set_requires_all_reduce(model_, last);
    if (micro_batches.size() > 1 && (i == 0 || last)) set_is_last_microbatch(model_, last);
    Batch whole = ahead ? std::move(parts[part]) : on_device(micro_batches[i]);
    sums.push_back(sums_of(forward_backward(std::move(whole), scale, ahead ? &*ahead : nullptr, part)));
  }
  reduce_replicated_gradients(replicated_, *group_);
  return at::stack(sums).sum(0);
}

DeviceStats TrainStep::gradients(const std::vector<Batch>& micro_batches, int64_t step, const ProcessGroupPtr& world) {
  constexpr int64_t kFirstSteps = 3;
  const auto& interval = options_.check_collective_order;
  const bool is_first = steps_++ < kFirstSteps && interval != 0;
  if (!is_first && (interval.value_or(0) == 0 || steps_ % *interval != 0)) return clip(backward(micro_batches));
  if (!order_) order_.emplace(model_, world);
  order_->begin_step(step);
  DeviceStats stats;
  try {
    stats = clip(backward(micro_batches));
  } catch (const c10::DistBackendError&) {
    const std::string why = order_->why_it_failed();
    if (!why.empty() && options_.sink) options_.sink(Severity::kWarning, why);
    throw;
  }
  order_->end_step();
  return stats;
}

DeviceStats TrainStep::clip(const at::Tensor& sums) {
  empty_unused_memory(1);
  const TimedPart timed(options_.timers, StepPart::kOptimizer);
  const TimedPart clipping(options_.timers, StepPart::kClip);
  GradScaler* const scaler = options_.scaler;
  const at::Tensor norm =
      optimizer_.clip_grad_norm(options_.clip_grad, scaler == nullptr ? at::Tensor() : scaler->scale_tensor());
  skip_ = options_.needs_finite_gradients || scaler != nullptr ? norm.isfinite().logical_not().to(at::kFloat)
                                                               : at::Tensor();
  if (scaler != nullptr) scaler->update(skip_);
  const at::Tensor scale = scaler == nullptr ? at::ones_like(norm) : scaler->scale_tensor();
  return {.grad_norm = norm.to(device_, at::kDouble), .loss_scale = scale.to(device_, at::kDouble), .sums = sums};
}

void TrainStep::update() {
  {
    const TimedPart timed(options_.timers, StepPart::kOptimizer);
    const TimedPart stepping(options_.timers, StepPart::kInnerStep);
    optimizer_.step(skip_);
  }
  skip_.reset();
  end_step();
  empty_unused_memory(2);
}

void TrainStep::end_step() {
  if (ends_.empty()) return;
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> counts;
  for (EndsSteps* each : ends_) counts.push_back(each->take_counts());
  const at::Tensor all = at::cat(counts);
  group_->all_reduce(all, ReduceOp::kSum).wait();
  int64_t first = 0;
  for (size_t i = 0; i < ends_.size(); ++i) {
    const int64_t size = counts[i].numel();
    ends_[i]->end_step(all.narrow(0, first, size));
    first += size;
  }
}

at::Tensor TrainStep::evaluate(const std::vector<Batch>& micro_batches) {
  const c10::NoGradGuard no_grad;
  const Scale scale{.global = {}, .micro_batches = 1};
  std::vector<Batch> parts;
  for (const Batch& each : micro_batches) parts.push_back(on_device(each));
  if (parts.size() > 1) {
    const at::Tensor losses = token_losses_of(model_, parts);
    const Batch all = joined(parts);
    const at::Tensor count = objective_.count(all);
    return sums_of(loss_of({.token_losses = losses}, all, count, factor_of(count, scale), scale).second);
  }
  const Batch mine = rows_of_rank(parts.front());
  const at::Tensor count = objective_.count(parts.front());
  return sums_of(loss_of(output_for(mine), mine, count, factor_of(count, scale), scale).second);
}

}  // namespace megashard
