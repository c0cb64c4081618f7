#include "parallel/fsdp/grad_scaler.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_set>

#include "parallel/collectives/device_mesh.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/guarded_tensor.h"

namespace megashard {

GradScaler::GradScaler(const Options& options, c10::Device device) : options_(options) {
  TORCH_CHECK_VALUE(options.initial_scale > 0 && options.min_scale <= options.initial_scale &&
                        options.growth_factor > 1 && options.backoff_factor > 0 && options.backoff_factor < 1 &&
                        options.growth_interval > 0 && options.hysteresis > 0,
                    "a loss scale starts above 0 and not below its least value, grows by a factor above 1, backs off "
                    "by one below 1, and counts at least one step for either: check GradScaler's options");
  scale_ = at::scalar_tensor(options.initial_scale, at::dtype(at::kFloat).device(device));
  growth_tracker_ = at::scalar_tensor(0, at::dtype(at::kDouble).device(device));
  hysteresis_tracker_ = at::scalar_tensor(options.hysteresis, growth_tracker_.options());
  found_inf_ = at::zeros_like(scale_);
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const { return loss * scale_; }

double GradScaler::scale() const { return scale_.item<float>(); }

bool GradScaler::finite() const { return found_inf_.item<float>() == 0; }

void GradScaler::unscale_(const std::vector<at::Tensor>& parameters) {
  TORCH_CHECK(
      !unscaled_,
      "GradScaler::unscale_ was called twice before update: gradients are divided by the scale once an iteration");
  unscaled_ = true;
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  std::vector<ProcessGroupPtr> groups;
  std::unordered_set<const c10::TensorImpl*> seen;
  c10::Device device = c10::kCPU, group_device = c10::kCPU;
  for (const auto& parameter : parameters) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    for (const auto& group : sharding_groups_of(parameter)) {
      if (std::find(groups.begin(), groups.end(), group) != groups.end()) continue;
      groups.push_back(group);
      group_device = group->device();
    }
    if (!parameter.grad().defined()) continue;
    gradients.push_back(unguarded(parameter.grad()));
    device = gradients.back().device();  // the CPU under CPU offload
  }
  at::Tensor found = at::zeros({1}, at::dtype(at::kFloat).device(device));
  const at::Tensor inverse = scale_.to(device, at::kDouble).reciprocal().to(at::kFloat);
  if (!gradients.empty()) at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
  if (!groups.empty()) found = found.to(group_device);
  for (const auto& group : groups) group->all_reduce(found, ReduceOp::kMax).wait();
  found_inf_ = found.to(scale_.device()).squeeze(0);
}

void GradScaler::update() {
  TORCH_CHECK(unscaled_, "GradScaler::update ends an iteration that unscale_ began: call unscale_ first");
  unscaled_ = false;
  update(found_inf_);
}

void GradScaler::update(const at::Tensor& found_inf) {
  if (!options_.is_dynamic) return;
  const c10::NoGradGuard no_grad;
  const at::Tensor found = found_inf.to(scale_.device()) > 0;
  const at::Tensor good = at::where(found, 0, growth_tracker_ + 1);
  const at::Tensor left = hysteresis_tracker_ - found.to(at::kDouble);
  const at::Tensor grows = good == options_.growth_interval;
  const at::Tensor larger = scale_ * options_.growth_factor;
  const at::Tensor smaller = (scale_ * options_.backoff_factor).clamp_min(options_.min_scale);
  const at::Tensor grown = at::where(grows.logical_and(larger.isfinite()), larger, scale_);
  scale_.copy_(at::where(found.logical_and(left <= 0), smaller, grown));
  growth_tracker_.copy_(at::where(grows, 0, good));
  hysteresis_tracker_.copy_(at::where(grows, options_.hysteresis, left));
}

GradScaler::State GradScaler::state() const {
  const at::Tensor all = at::stack({scale_.to(at::kDouble), growth_tracker_, hysteresis_tracker_}).cpu();
  const auto* values = all.const_data_ptr<double>();
  return {values[0], static_cast<int64_t>(values[1]), static_cast<int64_t>(values[2])};
}

void GradScaler::load_state(const State& state) {
  const c10::NoGradGuard no_grad;
  scale_.fill_(state.scale);
  growth_tracker_.fill_(state.growth_tracker);
  hysteresis_tracker_.fill_(state.hysteresis_tracker);
}

}  // namespace megashard
