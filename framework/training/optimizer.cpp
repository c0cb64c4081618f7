#include "framework/training/optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>

#include "checkpoint/dcp/state_dict_keys.h"
#include "parallel/collectives/guard_key.h"
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

/// Adds 1, or nothing where `skip` is 1.
void count_step(const std::vector<at::Tensor>& counts, const at::Tensor& skip) {
  if (counts.empty()) return;
  if (counts.front().is_cpu()) {
    const float one = skip.defined() ? 1 - *skip.const_data_ptr<float>() : 1;
    for (const auto& count : counts) *count.mutable_data_ptr<float>() += one;
  } else if (skip.defined()) {
    at::_foreach_add_(counts, 1 - skip);
  } else {
    at::_foreach_add_(counts, 1);
  }
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
  void run_kernel(const KernelLists& lists, const ParamGroup& group,
                  const std::optional<at::Tensor>& skip) const override {
    at::_fused_adamw_(lists.parameters, lists.gradients, lists.exp_avgs, lists.exp_avg_sqs,
                      /*max_exp_avg_sqs=*/{}, lists.steps, group.lr, options().beta1,
                      options().beta2, group.weight_decay, options().eps, /*amsgrad=*/false,
                      /*maximize=*/false, /*grad_scale=*/{}, /*found_inf=*/skip);
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
  void run_kernel(const KernelLists& lists, const ParamGroup& group,
                  const std::optional<at::Tensor>& skip) const override {
    at::_fused_sgd_(lists.parameters, lists.gradients, lists.momentum_buffers, group.weight_decay,
                    options().momentum, group.lr, /*dampening=*/0.0, /*nesterov=*/false,
                    /*maximize=*/false, /*is_first_step=*/false, /*grad_scale=*/{},
                    /*found_inf=*/skip);
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
  }
  clip_.reset();
}

void Optimizer::set_lr(double lr) {
  for (auto& group : param_groups_) group.lr = lr;
}

void Optimizer::set_weight_decay(double weight_decay) {
  for (auto& group : param_groups_) group.weight_decay = weight_decay * group.wd_mult;
}

at::Tensor Optimizer::clip_grad_norm(double max_norm) {
  const at::Tensor norm = total_grad_norm(parameters_, 2.0, parts_);
  clip_.reset();
  if (max_norm == 0) return norm;
  std::vector<at::Tensor> gradients;
  for (const auto& slot : slots_) {
    const at::Tensor& gradient = slot.parameter.grad();
    if (gradient.defined() && !slot.has_copy()) gradients.push_back(gradient);
  }
  clip_grads_with_norm_(gradients, max_norm, norm);
  clip_ = Clip{max_norm, norm};
  return norm;
}

/// Runs the kernel of a group on some slots after the other: on gradients that it can take as they
/// are at once, on others bucket by bucket, so that few of their casts live at a time.
class Optimizer::Buckets {
 public:
  Buckets(const Optimizer& optimizer, const ParamGroup& group,
          const std::optional<at::Tensor>& skip)
      : optimizer_(optimizer), group_(group), skip_(skip) {}

  void add(const Slot& slot) {
    const at::Tensor gradient = unguarded(slot.parameter.grad());
    const bool scaled = slot.has_copy() && optimizer_.clip_;
    const bool fits = !scaled && gradient.scalar_type() == slot.main.scalar_type();
    if (fits && gradient.is_contiguous()) {
      append(as_they_are_, slot, gradient, [](const at::Tensor& tensor) { return tensor; });
      if (slot.has_copy()) with_copies_.push_back(&slot);
      return;
    }
    const int64_t all = gradient.numel(), limit = optimizer_.options_.cast_elements;
    // A part is a row of the flat tensors; what has gaps is taken whole.
    const bool divides = all > limit && gradient.is_contiguous() && slot.main.is_contiguous() &&
                         slot.parameter.is_contiguous();
    if (!divides) return add_cast(slot, gradient, [](const at::Tensor& tensor) { return tensor; });
    for (int64_t begin = 0; begin < all; begin += limit) {
      const int64_t count = std::min(limit, all - begin);
      add_cast(slot, gradient, [=](const at::Tensor& tensor) {
        return unguarded(tensor).view({-1}).narrow(0, begin, count);
      });
    }
  }

  void finish() {
    flush();
    if (!as_they_are_.parameters.empty()) optimizer_.run_kernel(as_they_are_, group_, skip_);
    for (const Slot* slot : with_copies_) slot->parameter.copy_(slot->main);
  }

 private:
  template <class Part>
  static void append(KernelLists& lists, const Slot& slot, at::Tensor gradient, const Part& part) {
    lists.parameters.push_back(part(slot.main));
    lists.gradients.push_back(std::move(gradient));
    if (slot.exp_avg.defined()) lists.exp_avgs.push_back(part(slot.exp_avg));
    if (slot.exp_avg_sq.defined()) lists.exp_avg_sqs.push_back(part(slot.exp_avg_sq));
    if (slot.step.defined()) lists.steps.push_back(slot.step);
    if (slot.momentum_buffer.defined())
      lists.momentum_buffers.push_back(part(slot.momentum_buffer));
  }

  template <class Part>
  void add_cast(const Slot& slot, const at::Tensor& gradient, const Part& part) {
    const at::Tensor mine = part(gradient);
    if (cast_ > 0 && cast_ + mine.numel() > optimizer_.options_.cast_elements) flush();
    cast_ += mine.numel();
    const bool scaled = slot.has_copy() && optimizer_.clip_;
    const at::Tensor wide =
        mine.to(slot.main.scalar_type(), /*non_blocking=*/false, /*copy=*/scaled).contiguous();
    if (scaled) scaled_.push_back(wide);
    append(bucket_, slot, wide, part);
    if (slot.has_copy()) rounded_.emplace_back(part(slot.parameter), bucket_.parameters.back());
  }

  void flush() {
    if (bucket_.parameters.empty()) return;
    if (!scaled_.empty())
      clip_grads_with_norm_(scaled_, optimizer_.clip_->max_norm, optimizer_.clip_->norm);
    optimizer_.run_kernel(bucket_, group_, skip_);
    for (const auto& [parameter, main] : rounded_) parameter.copy_(main);
    bucket_ = {};
    scaled_.clear();
    rounded_.clear();
    cast_ = 0;
  }

  const Optimizer& optimizer_;
  const ParamGroup& group_;
  const std::optional<at::Tensor>& skip_;
  KernelLists as_they_are_, bucket_;
  std::vector<const Slot*> with_copies_;                    // of as_they_are_
  std::vector<at::Tensor> scaled_;                          // of bucket_: to be clipped
  std::vector<std::pair<at::Tensor, at::Tensor>> rounded_;  // of bucket_: parameter, fp32 copy
  int64_t cast_ = 0;                                        // elements of bucket_
};

void Optimizer::step(const at::Tensor& skip) {
  const at::NoGradGuard no_grad;
  std::vector<Slot*> stepped;
  std::vector<at::Tensor> counts;
  for (auto& slot : slots_) {
    if (!slot.parameter.grad().defined()) continue;
    check_sizes(slot);
    stepped.push_back(&slot);
    if (slot.step.defined()) counts.push_back(slot.step);
  }
  count_step(counts, skip);
  const auto skips = skip.defined() ? std::optional(skip) : std::nullopt;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    Buckets buckets(*this, param_groups_[group], skips);
    for (const Slot* slot : stepped) {
      if (slot->group == group) buckets.add(*slot);
    }
    buckets.finish();
  }
  // Neither the fused kernels nor parts of a parameter tell autograd.
  for (const Slot* slot : stepped) slot->parameter.unsafeGetTensorImpl()->bump_version();
  clip_.reset();
}

void Optimizer::check_sizes(const Slot& slot) {
  const auto& state = slot.exp_avg.defined() ? slot.exp_avg : slot.momentum_buffer;
  const auto& sized = state.defined() ? state : slot.main;
  TORCH_CHECK(sized.sizes() == slot.parameter.sizes(), "parameter '", slot.name,
              "' has local sizes ", slot.parameter.sizes(), ", its optimizer state ", sized.sizes(),
              ": make the optimizer after fully_shard, and step it outside forward and backward");
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
