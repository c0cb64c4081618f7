#include "framework/training/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <unordered_set>

#include "checkpoint/dcp/state_dict_keys.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

/// Megatron's default no_weight_decay_cond.
bool has_weight_decay(const std::string& name, const at::Tensor& parameter) {
  return !(name == "bias" || name.ends_with(".bias") || parameter.dim() <= 1);
}

at::Tensor zeros_for(const at::Tensor& main) {
  return at::zeros(main.sizes(), main.options().requires_grad(false));
}

class AdamW final : public Optimizer {
 public:
  AdamW(const NamedTensors& named_parameters, const OptimizerOptions& options)
      : Optimizer(named_parameters, options) {
    for (auto& slot : slots_) {
      slot.exp_avg = zeros_for(slot.main);
      slot.exp_avg_sq = zeros_for(slot.main);
      slot.step = at::zeros({}, slot.main.options().requires_grad(false));
    }
  }

 protected:
  void run_kernel(const KernelLists& lists, const ParamGroup& group) const override {
    if (lists.steps.front().is_cpu()) {
      for (const auto& step : lists.steps) *step.mutable_data_ptr<float>() += 1;
    } else {
      at::_foreach_add_(lists.steps, 1);
    }
    at::_fused_adamw_(lists.parameters, lists.gradients, lists.exp_avgs, lists.exp_avg_sqs,
                      /*max_exp_avg_sqs=*/{}, lists.steps, group.lr, options().beta1,
                      options().beta2, group.weight_decay, options().eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  }
};

/// torch.optim.SGD: weight decay joins the gradient; the momentum buffer starts as the first
/// gradient, which is what a buffer of zeros gives.
class Sgd final : public Optimizer {
 public:
  Sgd(const NamedTensors& named_parameters, const OptimizerOptions& options)
      : Optimizer(named_parameters, options) {
    if (options.momentum == 0) return;
    for (auto& slot : slots_) slot.momentum_buffer = zeros_for(slot.main);
  }

 protected:
  void run_kernel(const KernelLists& lists, const ParamGroup& group) const override {
    at::_fused_sgd_(lists.parameters, lists.gradients, lists.momentum_buffers, group.weight_decay,
                    options().momentum, group.lr, /*dampening=*/0.0, /*nesterov=*/false,
                    /*maximize=*/false, /*is_first_step=*/false);
  }
};

}  // namespace

Optimizer::Optimizer(const NamedTensors& named_parameters, const OptimizerOptions& options)
    : options_(options) {
  const at::NoGradGuard no_grad;
  ParamGroup decayed{
      .params = {}, .lr = options.lr, .weight_decay = options.weight_decay, .wd_mult = 1};
  ParamGroup plain{.params = {}, .lr = options.lr, .weight_decay = 0, .wd_mult = 0};
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& [name, parameter] : named_parameters) {
    if (!parameter.requires_grad()) continue;
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    TORCH_CHECK(!parameter.is_meta(), "parameter '", name,
                "' has no storage yet: make the optimizer after the model's weights are there");
    const bool decays = has_weight_decay(name, parameter);
    (decays ? decayed : plain).params.push_back(name);
    Slot slot;
    slot.name = name;
    slot.group = decays ? 0 : 1;
    slot.parameter = parameter;
    const bool copied =
        parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kHalf;
    slot.main = copied ? parameter.detach().to(at::kFloat) : parameter;
    slots_.push_back(std::move(slot));
    parameters_.push_back(parameter);
  }
  const bool only_plain = decayed.params.empty();
  if (!only_plain) param_groups_.push_back(std::move(decayed));
  if (!plain.params.empty()) param_groups_.push_back(std::move(plain));
  if (only_plain) {
    for (auto& slot : slots_) slot.group = 0;
  }
}

void Optimizer::zero_grad() {
  for (auto& slot : slots_) {
    slot.parameter.mutable_grad().reset();
    slot.clipped.reset();
  }
}

void Optimizer::set_lr(double lr) {
  for (auto& group : param_groups_) group.lr = lr;
}

void Optimizer::set_weight_decay(double weight_decay) {
  for (auto& group : param_groups_) group.weight_decay = weight_decay * group.wd_mult;
}

at::Tensor Optimizer::clip_grad_norm(double max_norm) {
  const at::Tensor norm = total_grad_norm(parameters_, 2.0, parts_);
  if (max_norm == 0) return norm;
  std::vector<at::Tensor> gradients;
  for (auto& slot : slots_) {
    const at::Tensor& gradient = slot.parameter.grad();
    if (!gradient.defined()) continue;
    if (!slot.has_copy()) {
      gradients.push_back(gradient);
      continue;
    }
    slot.clipped = gradient.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    gradients.push_back(slot.clipped);
  }
  clip_grads_with_norm_(gradients, max_norm, norm);
  return norm;
}

void Optimizer::step() {
  const at::NoGradGuard no_grad;
  std::vector<KernelLists> lists(param_groups_.size());
  std::vector<const Slot*> stepped;
  for (auto& slot : slots_) {
    at::Tensor gradient = take_gradient(slot);
    if (!gradient.defined()) continue;
    auto& list = lists[slot.group];
    list.parameters.push_back(slot.main);
    list.gradients.push_back(std::move(gradient));
    if (slot.exp_avg.defined()) list.exp_avgs.push_back(slot.exp_avg);
    if (slot.exp_avg_sq.defined()) list.exp_avg_sqs.push_back(slot.exp_avg_sq);
    if (slot.step.defined()) list.steps.push_back(slot.step);
    if (slot.momentum_buffer.defined()) list.momentum_buffers.push_back(slot.momentum_buffer);
    stepped.push_back(&slot);
  }
  for (size_t group = 0; group < lists.size(); ++group) {
    if (!lists[group].parameters.empty()) run_kernel(lists[group], param_groups_[group]);
  }
  for (const auto* slot : stepped) {
    if (slot->has_copy()) {
      slot->parameter.copy_(slot->main);
    } else {
      slot->parameter.unsafeGetTensorImpl()->bump_version();  // the fused kernels do not
    }
  }
}

at::Tensor Optimizer::take_gradient(Slot& slot) {
  const at::Tensor clipped = std::move(slot.clipped);
  slot.clipped.reset();
  const at::Tensor& gradient = slot.parameter.grad();
  if (!gradient.defined()) return {};
  const auto& state = slot.exp_avg.defined() ? slot.exp_avg : slot.momentum_buffer;
  const auto& sized = state.defined() ? state : slot.main;
  TORCH_CHECK(sized.sizes() == slot.parameter.sizes(), "parameter '", slot.name,
              "' has local sizes ", slot.parameter.sizes(), ", its optimizer state ", sized.sizes(),
              ": make the optimizer after fully_shard, and step it outside forward and backward");
  return clipped.defined() ? clipped : gradient.to(slot.main.scalar_type()).contiguous();
}

ShardedTensors Optimizer::sharded_state_dict() {
  ShardedTensors state;
  for (const auto& slot : slots_) {
    ShardedTensor piece = sharded_view(slot.parameter);
    const auto add = [&](const char* key, const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      piece.local = tensor;
      state.emplace_back(optimizer_state_key(slot.name, key), piece);
    };
    add(kExpAvgBuffer, slot.exp_avg);
    add("exp_avg_sq", slot.exp_avg_sq);
    if (slot.step.defined()) {
      state.emplace_back(optimizer_state_key(slot.name, kStepBuffer),
                         ShardedTensor::replicated(slot.step));
    }
    add("momentum_buffer", slot.momentum_buffer);
    if (slot.has_copy()) add(kFp32Buffer, slot.main);
  }
  return state;
}

void Optimizer::reload_model_parameters(
    const std::function<bool(const std::string& name)>& is_stale) {
  const at::NoGradGuard no_grad;
  for (const auto& slot : slots_) {
    if (slot.has_copy() && is_stale(slot.name)) slot.main.copy_(slot.parameter);
  }
}

std::unique_ptr<Optimizer> make_optimizer(const NamedTensors& named_parameters,
                                          const OptimizerOptions& options) {
  if (options.kind == OptimizerKind::kSgd) return std::make_unique<Sgd>(named_parameters, options);
  return std::make_unique<AdamW>(named_parameters, options);
}

}  // namespace megashard
