#include "parallel/fsdp/grad_scaler.h"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_set>

#include "parallel/collectives/device_mesh.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/guarded_tensor.h"

namespace megashard {

GradScaler::GradScaler(const Options& options) : options_(options), scale_(options.initial_scale) {
  TORCH_CHECK(options.initial_scale > 0 && options.growth_factor > 1 && options.backoff_factor > 0 &&
                  options.backoff_factor < 1 && options.growth_interval > 0,
              "a loss scale starts above 0, grows by a factor above 1 and backs off by one below 1: check GradScaler's "
              "options");
}

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
    device = gradients.back().device();  // the host, under CPU offload
  }
  const auto options = at::dtype(at::kFloat).device(device);
  at::Tensor found = at::zeros({1}, options);
  const at::Tensor inverse = at::scalar_tensor(1.0 / scale_, options);
  if (!gradients.empty()) at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
  if (!groups.empty()) found = found.to(group_device);
  for (const auto& group : groups) group->all_reduce(found, ReduceOp::kMax).wait();
  finite_ = found.item<float>() == 0;
}

void GradScaler::update() {
  TORCH_CHECK(unscaled_, "GradScaler::update ends an iteration that unscale_ began: call unscale_ first");
  unscaled_ = false;
  if (!finite_) {
    scale_ *= options_.backoff_factor;
    good_steps_ = 0;
  } else if (++good_steps_ == options_.growth_interval) {
    scale_ *= options_.growth_factor;
    good_steps_ = 0;
  }
}

}  // namespace megashard
