#include "framework/training/train_step.h"

#include <ATen/Functions.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "framework/training/sequence_group.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {

TrainStep::TrainStep(MultiModalModule& model, Optimizer& optimizer, ProcessGroupPtr group,
                     c10::Device device, const TrainStepOptions& options)
    : model_(model),
      optimizer_(optimizer),
      group_(std::move(group)),
      device_(device),
      options_(options) {}

void TrainStep::empty_unused_memory(int64_t from_level) {
  if (device_.is_cpu() || options_.empty_unused_memory_level < from_level) return;
  c10::getDeviceAllocator(device_.type())->emptyCache();
}

TrainStep::TokenLosses TrainStep::token_losses(const Batch& batch) {
  const SequenceShard shard{options_.sequence_group, batch.tokens.size(1)};
  ModelInput whole;
  whole.tokens = batch.tokens;
  whole.position_ids = batch.position_ids;
  whole.labels = batch.labels;
  whole.token_mask = batch.token_mask;
  whole.sequence = shard;
  whole.extra = batch.extra;
  ModelInput input = input_of_rank(model_, std::move(whole), device_);
  if (batch.attention_mask.defined())
    input.attention_mask = batch.attention_mask.to(device_, /*non_blocking=*/true).logical_not();
  const at::Tensor mask = batch.loss_mask.to(device_, /*non_blocking=*/true);
  return {model_(std::move(input)), shard.rows_of(mask, 1), mask};
}

at::Tensor TrainStep::forward_backward(const std::vector<Batch>& microbatches) {
  const TimedPart timed(options_.timers, StepPart::kForwardBackward);
  const auto count = static_cast<double>(microbatches.size());
  const double sequence_ranks = options_.sequence_group ? options_.sequence_group->size() : 1;
  double token_scale = 0;
  if (options_.calculate_per_token_loss) {
    at::Tensor tokens = at::zeros({1}, at::kDouble);
    for (const auto& batch : microbatches) tokens += batch.loss_mask.sum(at::kDouble);
    tokens = tokens.to(device_);
    group_->all_reduce(tokens, ReduceOp::kSum).wait();
    // fully_shard averages over the ranks; the mean over all tokens needs the sum. Every rank of a
    // sequence has counted its tokens.
    token_scale = group_->size() * sequence_ranks / std::max(tokens.item<double>(), 1.0);
  }
  std::vector<at::Tensor> sums;  // read after the last backward: no wait on the device in between
  for (size_t i = 0; i < microbatches.size(); ++i) {
    if (!options_.reduces_each_microbatch)
      set_requires_gradient_sync(model_, i + 1 == microbatches.size());
    if (options_.has_replicas) set_requires_all_reduce(model_, i + 1 == microbatches.size());
    at::Tensor loss;
    {
      const TimedPart forward(options_.timers, StepPart::kForward);
      const auto [losses, mask, whole_mask] = token_losses(microbatches[i]);
      const at::Tensor sum = (losses * mask).sum();
      loss = options_.calculate_per_token_loss
                 ? sum * token_scale
                 : sum * (sequence_ranks / count) / whole_mask.sum().clamp_min(1);
      sums.push_back(at::stack({sum.detach().to(at::kDouble), mask.sum().to(at::kDouble)}));
    }
    const TimedPart backward(options_.timers, StepPart::kBackward);
    loss.backward();
  }
  return at::stack(sums).sum(0);
}

at::Tensor TrainStep::clip() {
  const TimedPart timed(options_.timers, StepPart::kClip);
  return optimizer_.clip_grad_norm(options_.clip_grad);
}

void TrainStep::step_optimizer() {
  const TimedPart timed(options_.timers, StepPart::kInnerStep);
  optimizer_.step();
}

TrainStepResult TrainStep::update(const at::Tensor& sums) {
  const TimedPart timed(options_.timers, StepPart::kOptimizer);
  const at::Tensor norm = clip();
  const bool asks_first = options_.needs_finite_gradients;
  if (!asks_first) step_optimizer();
  // All that the host reads of a step, in one copy: the only wait on the device.
  const at::Tensor numbers =
      at::cat({sums, norm.to(sums.device(), at::kDouble).reshape({1})}).cpu();
  const auto* values = numbers.const_data_ptr<double>();
  TrainStepResult result;
  result.loss = {values[0], values[1]};
  result.grad_norm = values[2];
  result.updated = !asks_first || std::isfinite(result.grad_norm);
  if (asks_first && result.updated) step_optimizer();
  return result;
}

TrainStepResult TrainStep::run(const std::vector<Batch>& microbatches) {
  optimizer_.zero_grad();
  const at::Tensor sums = forward_backward(microbatches);
  empty_unused_memory(1);
  const TrainStepResult result = update(sums);
  empty_unused_memory(2);
  return result;
}

LossSums TrainStep::evaluate(const Batch& batch) {
  const c10::NoGradGuard no_grad;
  const auto [losses, mask, whole_mask] = token_losses(batch);
  return {(losses * mask).sum().item<double>(), mask.sum().item<double>()};
}

}  // namespace megashard
