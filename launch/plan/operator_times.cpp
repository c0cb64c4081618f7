#include "launch/plan/operator_times.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

#include "models/kernels/cross_entropy.h"
#include "models/kernels/fused_attention.h"
#include "models/kernels/fused_ops.h"
#include "parallel/fsdp/grad_norm.h"
#include "parallel/updates/adamw.h"

namespace megashard {
namespace {

struct BothWays {
  double forward = 0, backward = 0;  // seconds
};

/// A function of tensors that require gradients, and its gradient.
BothWays seconds_of(const Stopwatch& watch, const std::vector<at::Tensor>& inputs,
                    const std::function<at::Tensor()>& function) {
  const at::AutoGradMode grad(true);
  BothWays both;
  both.forward = watch.seconds_of([&] { function(); });
  const double all = watch.seconds_of([&] {
    const at::Tensor result = function();
    torch::autograd::grad({result}, inputs, {at::ones_like(result)});
  });
  both.backward = std::max(all - both.forward, both.forward / 10);
  return both;
}

at::Tensor trained(at::IntArrayRef sizes, c10::Device device = c10::kCPU) {
  return at::rand(sizes, at::device(device)).requires_grad_();
}

double adamw_seconds(const Stopwatch& watch, int64_t numel) {
  const auto main = at::ones({numel}), gradient = main.clone(), first = main.clone(), second = main.clone(),
             step = at::ones({1});
  AdamWPiece piece{.main = main.mutable_data_ptr(),
                   .gradient = gradient.const_data_ptr(),
                   .exp_avg = first.mutable_data_ptr(),
                   .exp_avg_sq = second.mutable_data_ptr(),
                   .step = step.const_data_ptr<float>(),
                   .rounded = nullptr,
                   .numel = numel,
                   .first_tile = 0,
                   .main_format = FloatFormat::kFloat,
                   .gradient_format = FloatFormat::kFloat,
                   .exp_avg_format = FloatFormat::kFloat,
                   .exp_avg_sq_format = FloatFormat::kFloat,
                   .rounded_format = FloatFormat::kFloat,
                   .vectors = false};
  const AdamWNumbers numbers{
      .lr = 1e-9, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0, .factor = nullptr, .skip = nullptr};
  return watch.seconds_of([&] { adamw_step({&piece, 1}, numbers, c10::kCPU); });
}

}  // namespace

void measure_attention(DeviceModel& model, const Stopwatch& watch, c10::Device device) {
  constexpr int64_t kLength = 1024, kHeads = 4;
  constexpr double kStart = 512, kBackwardOfForward = 2.5;  // as the plan counts
  for (const int64_t channels : {64, 128}) {
    const auto heads = [&] { return trained({1, kLength, kHeads, channels}, device); };
    const auto q = heads(), k = heads(), v = heads();
    const double scale = 1 / std::sqrt(static_cast<double>(channels));
    const auto both = seconds_of(watch, {q, k, v}, [&] {
      if (has_fused_attention(q)) return fused_attention(q, k, v, {}, scale);
      return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0,
                                              /*is_causal=*/true);
    });
    const double flops = 2.0 * static_cast<double>(kHeads * kLength * kLength * channels);
    const double full = (kLength + kStart) / kLength / model.flops_32;  // of long sequences
    model.attention.push_back(
        {channels, flops / both.forward * full, kBackwardOfForward * flops / both.backward * full});
  }
}

void measure_operators(DeviceModel& model, const Stopwatch& watch) {
  constexpr int64_t kTokens = 1024, kWidth = 1024, kHeads = 16;
  constexpr double kBytes = 4.0 * kTokens * kWidth;  // of a tensor
  const auto add = [&](const char* name, double tensors, double seconds) {
    model.operators[name] = tensors * kBytes / seconds;
  };
  const auto x = trained({kTokens, kWidth}), y = trained({kTokens, kWidth}), weight = trained({kWidth});
  const BothWays norm = seconds_of(watch, {x, weight}, [&] { return rms_norm(x, weight, 1e-5); });
  add("rms_norm_kernel", 2, norm.forward);
  add("rms_norm_grad_kernel", 3, norm.backward);
  const BothWays gate = seconds_of(watch, {x, y}, [&] { return swiglu(x, y); });
  add("swiglu_kernel", 3, gate.forward);
  add("swiglu_grad_kernel", 5, gate.backward);
  const auto heads = trained({1, kTokens, kHeads, kWidth / kHeads}), head_weight = trained({kWidth / kHeads});
  const auto angles = at::rand({kTokens, kWidth / kHeads / 2});
  add("rotate_kernel", 2, seconds_of(watch, {heads}, [&] { return rotate(heads, angles, angles); }).forward);
  const BothWays head_norm = seconds_of(watch, {heads, head_weight}, [&] {
    return norm_and_rotate(heads, {.weight = head_weight, .eps = 1e-5}, angles, angles);
  });
  add("head_norm_kernel", 2, head_norm.forward);
  add("head_norm_grad_kernel", 3, head_norm.backward);
  const auto labels = at::zeros({kTokens}, at::kLong);
  // Backward overwrites what it is given, which then are gradients: as good as logits.
  const BothWays loss = seconds_of(watch, {x}, [&] { return token_cross_entropy(x, labels); });
  add("cross_entropy_kernel", 1, loss.forward);
  add("cross_entropy_grad_kernel", 1, loss.backward);
  add("adamw_kernel", 7, adamw_seconds(watch, kTokens * kWidth));
  x.mutable_grad() = at::ones_like(x);
  add("squares_kernel", 1, watch.seconds_of([&] { total_grad_norm({x}, 2.0, {}); }));
}

}  // namespace megashard
