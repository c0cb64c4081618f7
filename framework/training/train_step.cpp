#include "framework/training/train_step.h"

#include <ATen/Functions.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "framework/training/replicated_gradients.h"
#include "framework/training/sequence_group.h"
#include "parallel/copies/on_device.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {

TrainStep::TrainStep(MultiModalModule& model, Optimizer& optimizer, ProcessGroupPtr group, c10::Device device,
                     const TrainStepOptions& options)
    : model_(model),
      optimizer_(optimizer),
      replicated_(replicated_parameters(optimizer.parameters())),
      group_(std::move(group)),
      device_(device),
      options_(options) {}

void TrainStep::empty_unused_memory(int64_t from_level) {
  if (device_.is_cpu() || options_.empty_unused_memory_level < from_level) return;
  c10::getDeviceAllocator(device_.type())->emptyCache();
}

TrainStep::TokenLosses TrainStep::token_losses(Batch batch) {
  batch.sequence = options_.sequence.with_length(batch.tokens.size(1));
  const at::Tensor mask = batch.sequence.rows_of(on_device(std::exchange(batch.loss_mask, {}), device_), 1);
  batch = batch_of_rank(model_, std::move(batch), device_);
  const at::Tensor weights = batch.loss_weights;
  return {model_(std::move(batch)), mask, weights};
}

at::Tensor TrainStep::forward_backward(const std::vector<Batch>& microbatches) {
  const TimedPart timed(options_.timers, StepPart::kForwardBackward);
  const auto count = static_cast<double>(microbatches.size());
  const double sequence_ranks = options_.sequence.is_whole() ? 1 : options_.sequence.group->size();
  at::Tensor token_scale;
  if (options_.calculate_per_token_loss) {
    at::Tensor tokens = at::zeros({1}, at::TensorOptions(at::kDouble).device(device_));
    for (const auto& batch : microbatches) tokens += on_device(batch.loss_mask, device_).sum(at::kDouble);
    group_->all_reduce(tokens, ReduceOp::kSum).wait();
    // fully_shard averages over the ranks; the mean over all tokens needs the sum. Every rank of a
    // sequence has counted its tokens.
    token_scale = (group_->size() * sequence_ranks / tokens.clamp_min(1.0))[0].to(at::kFloat);
  }
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < microbatches.size(); ++i) {
    const bool last = i + 1 == microbatches.size();
    if (!options_.reduces_each_microbatch) set_requires_gradient_sync(model_, last);
    if (options_.has_replicas) set_requires_all_reduce(model_, last);
    if (microbatches.size() > 1 && (i == 0 || last)) set_is_last_microbatch(model_, last);
    at::Tensor loss;
    {
      const TimedPart forward(options_.timers, StepPart::kForward);
      Batch batch = microbatches[i];
      const at::Tensor whole_mask = batch.loss_mask = on_device(batch.loss_mask, device_);
      at::Tensor factor =
          options_.scaler == nullptr ? at::ones({}, whole_mask.options()) : options_.scaler->scale_tensor();
      factor = options_.calculate_per_token_loss ? factor * token_scale
                                                 : factor / whole_mask.sum().clamp_min(1) * (sequence_ranks / count);
      batch.loss_weights = whole_mask * factor;
      const auto [losses, mask, weights] = token_losses(std::move(batch));
      loss = (losses * weights).sum();
      sums.push_back(at::stack({(losses.detach() * mask).sum().to(at::kDouble), mask.sum().to(at::kDouble)}));
    }
    const TimedPart backward(options_.timers, StepPart::kBackward);
    loss.backward();
  }
  reduce_replicated_gradients(replicated_, *group_);
  return at::stack(sums).sum(0);
}

at::Tensor TrainStep::gradients(const std::vector<Batch>& microbatches) {
  optimizer_.zero_grad();
  const at::Tensor sums = forward_backward(microbatches);
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
  const at::Tensor known = at::cat({sums, at::stack({norm, scale}).to(sums.device(), at::kDouble)});
  const at::Tensor of_routers = model_.take_router_losses();
  return of_routers.defined() ? at::cat({known, of_routers / static_cast<double>(microbatches.size())}) : known;
}

void TrainStep::gradients_of(const Batch& microbatch) {
  optimizer_.zero_grad();
  forward_backward({microbatch});
}

void TrainStep::update() {
  {
    const TimedPart timed(options_.timers, StepPart::kOptimizer);
    const TimedPart stepping(options_.timers, StepPart::kInnerStep);
    optimizer_.step(skip_);
  }
  skip_.reset();
  empty_unused_memory(2);
}

at::Tensor TrainStep::evaluate(const Batch& batch) {
  const c10::NoGradGuard no_grad;
  const auto [losses, mask, weights] = token_losses(batch);
  return at::stack({(losses * mask).sum().to(at::kDouble), mask.sum().to(at::kDouble)});
}

}  // namespace megashard
