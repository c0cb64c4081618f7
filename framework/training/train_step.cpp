#include "framework/training/train_step.h"

#include <ATen/Functions.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "framework/diagnostics.h"
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
      has_replicas_(has_replicas(model)) {
  for (const auto& module : model_.modules(/*include_self=*/false)) {
    if (auto* ends = dynamic_cast<EndsSteps*>(module.get())) ends_.push_back(ends);
  }
}

void TrainStep::empty_unused_memory(int64_t from_level) {
  if (device_.is_cpu() || options_.empty_unused_memory_level < from_level) return;
  c10::getDeviceAllocator(device_.type())->emptyCache();
}

Batch TrainStep::on_device(Batch batch) const {
  if (metric_names_.empty()) {
    for (const std::string& name : objective_.columns())
      require(batch.find(name).defined(),
              "the data have no column \"" + name + "\", which --objective needs (docs/objectives.md).");
  }
  batch.sequence = options_.sequence.with_length(batch.tokens().size(1));
  return to_device(model_.prepared(std::move(batch)), device_);
}

at::Tensor TrainStep::global_scale(const std::vector<Batch>& micro_batches) {
  if (!options_.calculate_per_token_loss) return {};
  at::Tensor terms = at::zeros({1}, at::TensorOptions(at::kDouble).device(device_));
  for (const Batch& batch : micro_batches) terms += objective_.count(batch).to(at::kDouble);
  group_->all_reduce(terms, ReduceOp::kSum).wait();
  // fully_shard averages over the ranks, and the mean over all terms needs the sum. Every rank of a sequence has
  // counted its terms.
  return (group_->size() * sequence_ranks() / terms.clamp_min(1.0))[0].to(at::kFloat);
}

std::vector<MetricSum> TrainStep::forward_backward(Batch whole, const at::Tensor& global_scale, double micro_batches) {
  const at::Tensor count = objective_.count(whole);
  at::Tensor factor = options_.scaler == nullptr ? at::ones({}, count.options()) : options_.scaler->scale_tensor();
  factor =
      global_scale.defined() ? factor * global_scale : factor / count.clamp_min(1) * (sequence_ranks() / micro_batches);
  at::Tensor total;
  std::vector<MetricSum> metrics;
  {
    const TimedPart forward(options_.timers, StepPart::kForward);
    const at::Tensor weights = objective_.weights(whole);
    if (weights.defined()) whole.set(kLossWeights, weights * factor, Axis::kToken, /*is_input=*/false);
    const Batch mine = rows_of_rank(std::move(whole));
    const ModelOutput output = model_(mine);
    TORCH_CHECK(output.token_losses.defined(), model_.class_name(),
                " returned no token_losses for a batch with labels");
    Loss loss = objective_(output.token_losses, mine);
    metrics = std::move(loss.metrics);
    // A model that has made the head's gradients in forward returns the sum that they are of.
    total = output.weighted_loss.defined() ? output.weighted_loss : loss.sum * factor;
    if (!output.aux.empty()) {
      const at::Tensor own = mine.find(kLossWeights);
      const at::Tensor share = own.defined() ? own.contiguous().sum() : factor * count / sequence_ranks();
      const at::Tensor one = at::ones({}, at::TensorOptions(at::kDouble).device(device_));
      for (const AuxTerm& term : output.aux) {
        const bool by_tokens = global_scale.defined() && term.tokens.defined();
        total = total + term.value * (by_tokens ? share * (term.tokens / count.clamp_min(1)) : share);
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
  const at::Tensor scale = global_scale(micro_batches);
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < micro_batches.size(); ++i) {
    const bool last = i + 1 == micro_batches.size();
    if (!options_.reduces_each_microbatch) set_requires_gradient_sync(model_, last);
    if (has_replicas_) set_requires_all_reduce(model_, last);
    if (micro_batches.size() > 1 && (i == 0 || last)) set_is_last_microbatch(model_, last);
    sums.push_back(
        sums_of(forward_backward(on_device(micro_batches[i]), scale, static_cast<double>(micro_batches.size()))));
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

at::Tensor TrainStep::evaluate(const Batch& batch) {
  const c10::NoGradGuard no_grad;
  const Batch mine = rows_of_rank(on_device(batch));
  return sums_of(objective_(model_(mine).token_losses, mine).metrics);
}

}  // namespace megashard
