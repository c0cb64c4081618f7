#include "models/kernels/fused_ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <tuple>

#include "framework/matrix_product.h"
#include "models/kernels/fused_operators.h"
#include "models/kernels/once_differentiable.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// Whether the backend of x has `fused` for its dtype.
template <class Fused>
bool has_kernel(const Fused& fused, const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) && fused.runs_on(x);
}
bool alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

/// Of tensors in fp32 the conversions are none.
struct LinearByFp32 : Function<LinearByFp32> {
  static Variable forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return fused_operators().linear_by_fp32(x, weight);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("linear");
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    const auto grad = grads[0].reshape({-1, weight.size(0)}).to(at::kFloat);
    Variable grad_x;
    Variable grad_weight;
    if (context->needs_input_grad(0)) {
      grad_x = matrix_product(grad, weight.to(at::kFloat)).to(x.scalar_type()).view(x.sizes());
    }
    if (context->needs_input_grad(1)) {
      const auto rows = x.reshape({-1, weight.size(1)}).to(at::kFloat);
      grad_weight = matrix_product(grad.t(), rows).to(weight.scalar_type());
    }
    return {grad_x, grad_weight};
  }
};

struct OwnGradient : Function<OwnGradient> {
  static Variable forward(AutogradContext* /*context*/, const at::Tensor& weight) { return weight; }

  static variable_list backward(AutogradContext* /*context*/, const variable_list& grads) {
    return {at::GradMode::is_enabled() ? grads[0] : grads[0].detach()};
  }
};

struct RmsNormFunction : Function<RmsNormFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight, double eps) {
    const auto x = input.contiguous();
    const auto [y, inverse_rms] = fused_operators().rms_norm(x, weight, eps);
    context->save_for_backward({x, weight, inverse_rms});
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("rms_norm");
    const auto saved = context->get_saved_variables();
    auto [grad_x, grad_weight] = fused_operators().rms_norm_backward(grads[0].contiguous(), saved[0], saved[1],
                                                                     saved[2], context->needs_input_grad(1));
    if (grad_weight.defined()) grad_weight = grad_weight.to(saved[1].scalar_type());
    return {grad_x, grad_weight, Variable()};
  }
};

at::Tensor run_rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  const auto dense = x.stride(-1) == 1 ? x : x.contiguous();
  return fused_operators().rotate(dense, cos, sin, back);
}

struct RotateFunction : Function<RotateFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    context->save_for_backward({cos, sin});
    return run_rotate(x, cos, sin, /*back=*/false);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("rotate");
    const auto saved = context->get_saved_variables();
    return {run_rotate(grads[0], saved[0], saved[1], /*back=*/true), Variable(), Variable()};
  }
};

struct SwigluFunction : Function<SwigluFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& gate_in, const at::Tensor& up_in) {
    const auto gate = gate_in.contiguous();
    const auto up = up_in.contiguous();
    context->save_for_backward({gate, up});
    return fused_operators().swiglu(gate, up);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("swiglu");
    const auto saved = context->get_saved_variables();
    const auto [grad_gate, grad_up] = fused_operators().swiglu_backward(grads[0].contiguous(), saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

/// Rows of logits that the operator path turns to fp32 at a time.
int64_t rows_at_a_time(const at::Tensor& logits) {
  return std::max<int64_t>(1, (int64_t{1} << 25) / std::max<int64_t>(1, logits.size(1)));
}

FusedOperators::TwoTensors cross_entropy_by_operators(const at::Tensor& logits, const at::Tensor& labels) {
  auto loss = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
  auto stats = at::empty_like(loss);
  const int64_t step = rows_at_a_time(logits);
  for (int64_t row = 0; row < logits.size(0); row += step) {
    const int64_t count = std::min(step, logits.size(0) - row);
    const auto chunk = logits.narrow(0, row, count).to(at::kFloat);
    const auto label = labels.narrow(0, row, count);
    const auto valid = label.ge(0);
    const auto sum = at::logsumexp(chunk, 1);
    const auto at_label = chunk.gather(1, label.clamp_min(0).unsqueeze(1)).squeeze(1);
    loss.narrow(0, row, count).copy_((sum - at_label) * valid);
    stats.narrow(0, row, count).copy_(sum);
  }
  return {loss, stats};
}

void cross_entropy_backward_by_operators_(at::Tensor& logits, const at::Tensor& labels, const at::Tensor& stats,
                                          const at::Tensor& grad_loss) {
  const int64_t step = rows_at_a_time(logits);
  for (int64_t row = 0; row < logits.size(0); row += step) {
    const int64_t count = std::min(step, logits.size(0) - row);
    auto target = logits.narrow(0, row, count);
    const auto label = labels.narrow(0, row, count).unsqueeze(1);
    const auto scale = (grad_loss.narrow(0, row, count).unsqueeze(1)) * label.ne(kIgnoredLabel);
    auto grad = at::sub(target.to(at::kFloat), stats.narrow(0, row, count).unsqueeze(1)).exp_().mul_(scale);
    grad.scatter_add_(1, label.clamp_min(0), scale.neg() * label.ge(0));
    target.copy_(grad);
  }
}

constexpr int64_t kLabelOfOtherRank = -1;

/// Within this rank's piece of the vocabulary.
at::Tensor labels_of_piece(const at::Tensor& labels, int64_t width, int64_t rank) {
  const auto own = labels - rank * width;
  const auto others = own.lt(0).logical_or(own.ge(width));
  return own.masked_fill(others, kLabelOfOtherRank).masked_fill(labels.eq(kIgnoredLabel), kIgnoredLabel);
}

/// Of pieces of the vocabulary, from those of this rank's: the loss on all ranks, and the sum of all exponentials.
FusedOperators::TwoTensors combine_pieces(const at::Tensor& loss, const at::Tensor& stats, const at::Tensor& labels,
                                          ProcessGroup& ranks) {
  const bool by_kernel = stats.dim() == 2;  // largest logit and the rest of the sum
  const auto own = by_kernel ? stats.sum(1) : stats;
  const auto sums = at::empty({ranks.size() * own.numel()}, own.options());
  ranks.all_gather_into(sums, own).wait();
  const auto whole = at::logsumexp(sums.view({ranks.size(), -1}), 0);
  const auto losses = (loss + (whole - own)) * labels.ge(0);
  ranks.all_reduce(losses, ReduceOp::kSum).wait();
  return {losses, by_kernel ? at::stack({whole, at::zeros_like(whole)}, 1) : whole};
}

struct CrossEntropyFunction : Function<CrossEntropyFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& all_labels,
                          const ProcessGroupPtr& ranks) {
    const auto logits = input.contiguous();
    const bool in_pieces = ranks != nullptr && ranks->size() > 1;
    const auto labels = in_pieces ? labels_of_piece(all_labels, logits.size(1), ranks->rank()) : all_labels;
    const auto& fused = fused_operators().cross_entropy;
    auto [loss, stats] = has_kernel(fused, logits) ? fused(logits, labels) : cross_entropy_by_operators(logits, labels);
    if (in_pieces) std::tie(loss, stats) = combine_pieces(loss, stats, labels, *ranks);
    context->save_for_backward({logits, labels, stats});
    return loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("token_cross_entropy");
    TORCH_CHECK(context->saved_data.count("consumed") == 0,
                "the loss was already differentiated, and its logits are overwritten by their gradient: call backward "
                "once, without retain_graph");
    context->saved_data["consumed"] = true;
    const auto saved = context->get_saved_variables();
    auto logits = saved[0].detach();  // its gradient from here on
    const auto grad_loss = grads[0].contiguous();
    const auto& fused = fused_operators().cross_entropy_backward_;
    if (has_kernel(fused, logits)) {
      fused(logits, saved[1], saved[2], grad_loss);
    } else {
      cross_entropy_backward_by_operators_(logits, saved[1], saved[2], grad_loss);
    }
    return {logits, Variable(), Variable()};
  }
};

}  // namespace

bool by_way_of_fp32(const at::Tensor& x) {
#if defined(__x86_64__)
  static const bool slow_bf16 = __builtin_cpu_supports("avx512bw") == 0;
  const bool slow = x.scalar_type() == at::kHalf || (slow_bf16 && x.scalar_type() == at::kBFloat16);
  return slow && fused_operators().linear_by_fp32.runs_on(x);
#else
  return false;
#endif
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if ((by_way_of_fp32(x) || has_own_products(x)) && alike(x, weight)) {
    const auto product = LinearByFp32::apply(x, weight);
    return bias.defined() ? product + bias : product;
  }
  return at::linear(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
}

at::Tensor with_own_gradient(const at::Tensor& weight) { return OwnGradient::apply(weight); }

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0), "rms_norm: the last dimension of x ",
              x.sizes(), " must be that of the weight ", weight.sizes());
  if (has_kernel(fused_operators().rms_norm, x) && alike(x, weight)) return RmsNormFunction::apply(x, weight, eps);
  return at::rms_norm(x, {x.size(-1)}, weight, eps);
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const bool fits = x.dim() == 4 && cos.sizes() == sin.sizes() && cos.size(-2) == x.size(1) &&
                    2 * cos.size(-1) <= x.size(3) && (cos.dim() == 2 || cos.size(0) == 1 || cos.size(0) == x.size(0));
  TORCH_CHECK(fits, "rotate: x ", x.sizes(), " must be [B, T, H, D], and cos ", cos.sizes(), " and sin ", sin.sizes(),
              " [T, R/2] or [B, T, R/2] with R <= D: do the position ids have the sizes of the tokens?");
  if (has_kernel(fused_operators().rotate, x) && alike(x, cos))
    return RotateFunction::apply(x, cos.contiguous(), sin.contiguous());
  const int64_t half = cos.size(-1);
  const auto c = cos.unsqueeze(-2);
  const auto s = sin.unsqueeze(-2);
  const auto first = x.narrow(3, 0, half);
  const auto second = x.narrow(3, half, half);
  const auto rest = x.narrow(3, 2 * half, x.size(3) - 2 * half);
  return at::cat({first * c - second * s, second * c + first * s, rest}, 3);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  TORCH_CHECK(gate.sizes() == up.sizes(), "swiglu: gate ", gate.sizes(), " and up ", up.sizes(), " must be alike");
  if (has_kernel(fused_operators().swiglu, gate) && alike(gate, up)) return SwigluFunction::apply(gate, up);
  return at::silu(gate) * up;
}

at::Tensor token_cross_entropy(const at::Tensor& logits, const at::Tensor& labels) {
  return vocab_parallel_cross_entropy(logits, labels, nullptr);
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                        const ProcessGroupPtr& ranks) {
  TORCH_CHECK(logits.dim() >= 1 && logits.sizes().slice(0, logits.dim() - 1) == labels.sizes(), "logits ",
              logits.sizes(), " must be the sizes of the labels ", labels.sizes(), " and the vocabulary");
  TORCH_CHECK(labels.scalar_type() == at::kLong, "labels must be int64, got ", labels.scalar_type());
  const int64_t width = logits.size(-1), vocabulary = width * (ranks == nullptr ? 1 : ranks->size());
  const auto flat = labels.reshape({-1}).contiguous();
  if (flat.device().is_cpu()) {  // on a GPU the check would stall the stream; the gather asserts there
    const auto* label = flat.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < flat.numel(); ++i) {
      TORCH_CHECK(label[i] == kIgnoredLabel || (label[i] >= 0 && label[i] < vocabulary), "label ", label[i],
                  " lies outside the model's vocabulary of ", vocabulary,
                  ": the data were tokenised with another tokenizer than the model's");
    }
  }
  return CrossEntropyFunction::apply(logits.reshape({-1, width}), flat, ranks).view(labels.sizes());
}

}  // namespace megashard
