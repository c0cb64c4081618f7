#include "launch/plan/operator_times.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "models/kernels/cross_entropy.h"
#include "models/kernels/fused_ops.h"
#include "models/layers/causal_attention.h"
#include "parallel/copies/batched_copy.h"
#include "parallel/device/streams.h"
#include "parallel/fsdp/grad_norm.h"
#include "parallel/updates/adamw.h"

namespace megashard {

double Stopwatch::seconds_of(int calls, const std::function<void()>& work) const {
  work();
  const auto wait = [this] {
    if (!device_.is_cpu()) StreamEvent::record(current_stream(device_)).synchronize();
  };
  wait();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) work();
  wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / calls;
}

double Stopwatch::seconds_of(const std::function<void()>& work) const {
  constexpr double kRound = 0.02;
  constexpr int kMostCalls = 10'000;
  const double once = seconds_of(1, work);
  const int calls = std::clamp(static_cast<int>(kRound / once), 1, kMostCalls);
  std::array<double, 5> rounds{};
  for (double& each : rounds) each = seconds_of(calls, work);
  std::ranges::nth_element(rounds, rounds.begin() + 2);
  return rounds[2];
}

namespace {

constexpr int64_t kSide = 1024;  // rows, and elements of each
constexpr int64_t kNumel = kSide * kSide;
constexpr size_t kCopies = 16;  // of all inputs: at least 32 MiB, more than a core's share of the cache

struct BothWays {
  double forward = 0, backward = 0;  // seconds
};

using Inputs = std::vector<at::Tensor>;

/// Measures a function of tensors that require gradients, and its backward. Each call uses other tensors, because in a
/// training they are no longer in cache.
BothWays seconds_of(const Stopwatch& watch, const std::function<Inputs()>& make,
                    const std::function<at::Tensor(const Inputs&)>& function) {
  const at::AutoGradMode grad(true);
  std::vector<Inputs> copies(kCopies);
  std::ranges::generate(copies, make);
  size_t calls = 0;
  BothWays both;
  both.forward = watch.seconds_of([&] { function(copies[calls++ % kCopies]); });
  const at::Tensor ones = at::ones_like(function(copies[0]));
  const double all = watch.seconds_of([&] {
    const Inputs& inputs = copies[calls++ % kCopies];
    torch::autograd::grad({function(inputs)}, inputs, {ones});
  });
  both.backward = std::max(all - both.forward, both.forward / 10);
  return both;
}

at::Tensor trained(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device = c10::kCPU) {
  return at::rand(sizes, at::dtype(dtype).device(device)).requires_grad_();
}

constexpr int64_t kOfOptimizer = 16 << 20;  // elements; exceeds caches, as a model's weights do

double adamw_seconds(const Stopwatch& watch) {
  const auto main = at::ones({kOfOptimizer}), gradient = main.clone(), first = main.clone(), second = main.clone(),
             step = at::ones({1});
  AdamWPiece piece{.main = main.mutable_data_ptr(),
                   .gradient = gradient.const_data_ptr(),
                   .exp_avg = first.mutable_data_ptr(),
                   .exp_avg_sq = second.mutable_data_ptr(),
                   .step = step.const_data_ptr<float>(),
                   .rounded = nullptr,
                   .numel = kOfOptimizer,
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

double squares_seconds(const Stopwatch& watch) {
  const auto parameter = at::ones({kOfOptimizer}).requires_grad_();
  parameter.mutable_grad() = at::ones({kOfOptimizer});
  return watch.seconds_of([&] { total_grad_norm({parameter}); });
}

/// Measures the conversion from fp32 to bf16 of gathered weights.
double copy_seconds(const Stopwatch& watch) {
  const auto from = at::ones({kOfOptimizer}), to = at::ones({kOfOptimizer}, at::kBFloat16);
  const RowsCopy copy{.from = from.const_data_ptr(),
                      .to = to.mutable_data_ptr(),
                      .from_dtype = at::kFloat,
                      .to_dtype = at::kBFloat16,
                      .row_numel = kOfOptimizer,
                      .numel = kOfOptimizer};
  return watch.seconds_of([&] { copy_batch({&copy, 1}, c10::kCPU); });
}

/// Measures elementwise operators of models in a dtype.
std::map<std::string, double> operators_in(at::ScalarType dtype, const Stopwatch& watch) {
  constexpr int64_t kHeads = 16;
  std::map<std::string, double> all;
  const auto add = [&](const char* name, double tensors, double seconds) {
    all[name] = tensors * static_cast<double>(kNumel) * static_cast<double>(c10::elementSize(dtype)) / seconds;
  };
  const auto rows = [&] { return trained({kSide, kSide}, dtype); };
  const BothWays norm = seconds_of(
      watch,
      [&] {
        return Inputs{rows(), trained({kSide}, dtype)};
      },
      [](const Inputs& x) { return rms_norm(x[0], x[1], 1e-5); });
  add("rms_norm_kernel", 2, norm.forward);
  add("rms_norm_grad_kernel", 3, norm.backward);
  const BothWays gate = seconds_of(
      watch,
      [&] {
        return Inputs{rows(), rows()};
      },
      [](const Inputs& x) { return swiglu(x[0], x[1]); });
  add("swiglu_kernel", 3, gate.forward);
  add("swiglu_grad_kernel", 5, gate.backward);
  const auto angles = at::rand({kSide, kSide / kHeads / 2}, at::dtype(dtype));
  const auto heads = [&] { return trained({1, kSide, kHeads, kSide / kHeads}, dtype); };
  const BothWays turn = seconds_of(
      watch, [&] { return Inputs{heads()}; }, [&](const Inputs& x) { return rotate(x[0], angles, angles); });
  add("rotate_kernel", 2, turn.forward);
  const BothWays head_norm = seconds_of(
      watch,
      [&] {
        return Inputs{heads(), trained({kSide / kHeads}, dtype)};
      },
      [&](const Inputs& x) { return norm_and_rotate(x[0], {.weight = x[1], .eps = 1e-5}, angles, angles); });
  add("head_norm_kernel", 2, head_norm.forward);
  add("head_norm_grad_kernel", 3, head_norm.backward);
  const auto labels = at::zeros({kSide}, at::kLong);
  // Backward overwrites its input with gradients, which are equivalent to logits here.
  const BothWays loss = seconds_of(
      watch, [&] { return Inputs{rows()}; }, [&](const Inputs& x) { return token_cross_entropy(x[0], labels); });
  add("cross_entropy_kernel", 1, loss.forward);
  add("cross_entropy_grad_kernel", 1, loss.backward);
  return all;
}

std::vector<DeviceModel::AttentionShare> attention_in(at::ScalarType dtype, double peak, const Stopwatch& watch,
                                                      c10::Device device) {
  constexpr int64_t kLength = 1024, kHeads = 4;
  constexpr double kStart = 512, kBackwardOfForward = 2.5;  // as in the plan's model
  std::vector<DeviceModel::AttentionShare> shares;
  for (const int64_t channels : {64, 128}) {
    const auto heads = [&] { return trained({1, kLength, kHeads, channels}, dtype, device); };
    const double scale = 1 / std::sqrt(static_cast<double>(channels));
    const auto attend = [&](const Inputs& x) {
      if (has_fused_attention(x[0])) return fused_attention(x[0], x[1], x[2], {}, scale);
      return at::scaled_dot_product_attention(x[0].transpose(1, 2), x[1].transpose(1, 2), x[2].transpose(1, 2), {}, 0.0,
                                              /*is_causal=*/true);
    };
    const BothWays both = seconds_of(
        watch,
        [&] {
          return Inputs{heads(), heads(), heads()};
        },
        attend);
    const double flops = 2.0 * static_cast<double>(kHeads * kLength * kLength * channels);
    const double full = (kLength + kStart) / kLength / peak;  // for long sequences
    shares.push_back({channels, flops / both.forward * full, kBackwardOfForward * flops / both.backward * full});
  }
  return shares;
}

}  // namespace

void measure_attention(DeviceModel& model, const Stopwatch& watch, c10::Device device) {
  model.attention = attention_in(at::kFloat, model.flops_32, watch, device);
  model.attention_16 = attention_in(at::kBFloat16, model.flops_16, watch, device);
}

void measure_operators(DeviceModel& model, const Stopwatch& watch) {
  model.operators = operators_in(at::kFloat, watch);
  model.operators_16 = operators_in(at::kBFloat16, watch);
  constexpr double kWide = 4, kNarrow = 2;  // bytes
  model.operators["adamw_kernel"] = 7 * kWide * kOfOptimizer / adamw_seconds(watch);
  model.operators["squares_kernel"] = kWide * kOfOptimizer / squares_seconds(watch);
  model.operators["copy_kernel"] = (kWide + kNarrow) * kOfOptimizer / copy_seconds(watch);
}

}  // namespace megashard
