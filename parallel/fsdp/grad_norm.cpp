#include "parallel/fsdp/grad_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

#include "parallel/collectives/device_mesh.h"
#include "parallel/device/device_plan.h"
#include "parallel/fsdp/detail/fsdp_param.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/guarded_tensor.h"
#include "parallel/lanes/instructions.h"
#include "parallel/updates/squares.h"

namespace megashard {

namespace gradient_loops {
namespace {

// The two loops of a training step over every gradient.
#define MEGASHARD_WITH_LANES "parallel/fsdp/gradient_loops.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

template <class T>
double sum_of_squares(const T* values, int64_t n) {
  MEGASHARD_RUN(SumOfSquares, values, n)
  return 0;  // not reached
}
double sum_of_squares(const double* values, int64_t n) { return std::inner_product(values, values + n, values, 0.0); }

template <class T>
void multiply(T* values, int64_t n, float factor) {
  MEGASHARD_RUN(Multiply, values, n, factor)
}
void multiply(double* values, int64_t n, double factor) {
  for (int64_t i = 0; i < n; ++i) values[i] *= factor;
}
#undef MEGASHARD_RUN

}  // namespace
}  // namespace gradient_loops

namespace {

constexpr double kEpsilon = 1e-6;

/// Gradients whose norms are summed over the same groups.
struct Bucket {
  std::vector<ProcessGroupPtr> groups;  // sharding groups
  c10::Device group_device = c10::kCPU;
  std::vector<at::Tensor> gradients;
};

struct Gradients {
  std::vector<Bucket> buckets;  // in parameter order, which is the same on every rank
  c10::Device device = c10::kCPU;
};

/// Copies no groups if the bucket exists: called for every parameter in every step.
Bucket& bucket_of(std::vector<Bucket>& buckets, const at::Tensor& parameter) {
  const auto* param = find_fsdp_param(parameter);
  const auto own = param == nullptr ? sharding_groups_of(parameter) : std::vector<ProcessGroupPtr>();
  const auto& groups = param == nullptr ? own : param->sharding_groups();
  const auto found = std::ranges::find(buckets, groups, &Bucket::groups);
  if (found != buckets.end()) return *found;
  return buckets.emplace_back(Bucket{groups, groups.empty() ? parameter.device() : groups.front()->device(), {}});
}

/// The defined tensors in order; a tied one at its first position.
std::vector<const at::Tensor*> each_once(const std::vector<at::Tensor>& tensors) {
  std::vector<const at::Tensor*> found;
  found.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    if (tensor.defined()) found.push_back(&tensor);
  }
  std::ranges::sort(found, {}, [](const at::Tensor* each) { return std::pair(each->unsafeGetTensorImpl(), each); });
  const auto repeated = std::ranges::unique(found, {}, [](const auto* each) { return each->unsafeGetTensorImpl(); });
  found.erase(repeated.begin(), repeated.end());
  std::ranges::sort(found);
  return found;
}

enum class Part { kGradient, kParameter };

Gradients collect_gradients(const std::vector<at::Tensor>& parameters, Part part = Part::kGradient) {
  Gradients found;
  const auto listed = each_once(parameters);
  if (!listed.empty()) found.device = listed.front()->device();
  for (const at::Tensor* each : listed) {
    const at::Tensor& parameter = *each;
    auto& bucket = bucket_of(found.buckets, parameter);  // even without a gradient: all ranks must match
    if (bucket.gradients.empty()) bucket.gradients.reserve(listed.size());
    const at::Tensor gradient = part == Part::kGradient ? parameter.grad() : reshard_and_view(parameter).local.detach();
    if (!gradient.defined()) continue;
    TORCH_CHECK(gradient.layout() == at::kStrided, "the norm of a sparse gradient of sizes ", gradient.sizes(),
                " was asked for: build the embedding with sparse=false");
    TORCH_CHECK(gradient.device() == found.device, "gradients lie on ", found.device, " and ", gradient.device(),
                ": the norm takes parameters of one device");
    bucket.gradients.push_back(gradient);
  }
  return found;
}

/// Sum of f(|x|) over n values; the order of additions is the same on every machine.
template <class T, class F>
double sum_over(const T* values, int64_t n, F f) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += f(static_cast<double>(values[i]));
  return total;
}

template <class T>
double largest(const T* values, int64_t n) {
  double best = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double value = std::abs(static_cast<double>(values[i]));
    if (!(value <= best)) best = value;  // also true for NaN
    if (std::isnan(value)) break;
  }
  return best;
}

/// Largest |g|, or sum of |g|^norm_type, of one gradient on the CPU.
double local_power_cpu(const at::Tensor& gradient, double norm_type) {
  if (plan_host_pass(static_cast<int64_t>(gradient.nbytes()))) return 1;
  const at::Tensor dense = gradient.contiguous();
  return AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dense.scalar_type(), "total_grad_norm", [&]() -> double {
        const auto* values = dense.const_data_ptr<scalar_t>();
        const int64_t n = dense.numel();
        if (std::isinf(norm_type)) return largest(values, n);
        if (norm_type == 2.0) return gradient_loops::sum_of_squares(values, n);
        if (norm_type == 1.0) return sum_over(values, n, [](double x) { return std::abs(x); });
        return sum_over(values, n, [&](double x) { return std::pow(std::abs(x), norm_type); });
      });
}

at::Tensor local_power(const Bucket& bucket, c10::Device device, double norm_type) {
  const auto& gradients = bucket.gradients;
  const bool take_max = std::isinf(norm_type);
  if (device.is_cpu()) {
    double total = 0;
    for (const auto& gradient : gradients) {
      const double power = local_power_cpu(gradient, norm_type);
      if (!take_max) total += power;
      if (take_max && !(power <= total) && !std::isnan(total)) total = power;
    }
    return at::scalar_tensor(total, at::dtype(at::kDouble));
  }
  std::vector<at::Tensor> some;  // a rank may have no rows
  for (const auto& gradient : gradients) {
    if (gradient.numel() > 0) some.push_back(unguarded(gradient));
  }
  if (some.empty()) return at::zeros({}, at::dtype(at::kDouble).device(device));
  // In fp64 as on the CPU, so that the norm and the clipped gradients are bit-identical.
  if (norm_type == 2.0) return sum_of_squares(some);
  const auto norms = at::_foreach_norm(some, norm_type, at::kDouble);
  const auto norm = at::linalg_vector_norm(at::stack(norms), norm_type);
  return take_max ? norm : norm.pow(norm_type);
}

/// Reduces the buckets' values (0-d, on `device`) over all ranks: one all-reduce per group, for the values of all
/// buckets that it shards.
void reduce_values(std::vector<at::Tensor>& values, const std::vector<Bucket>& buckets, c10::Device device,
                   ReduceOp op) {
  std::vector<ProcessGroupPtr> groups;
  for (const auto& bucket : buckets) {
    for (const auto& group : bucket.groups) {
      if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
    }
  }
  for (const auto& group : groups) {
    std::vector<size_t> concerned;
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < buckets.size(); ++i) {
      const auto& among = buckets[i].groups;
      if (std::find(among.begin(), among.end(), group) == among.end()) continue;
      concerned.push_back(i);
      parts.push_back(values[i]);
    }
    // Offloaded gradients are on the CPU, their group may not be.
    const at::Tensor shared = at::stack(parts).to(buckets[concerned.front()].group_device);
    group->all_reduce(shared, op).wait();
    const at::Tensor back = shared.to(device);
    for (size_t i = 0; i < concerned.size(); ++i) values[concerned[i]] = back.select(0, static_cast<int64_t>(i));
  }
}

at::Tensor norm_of(const Gradients& gradients, double norm_type) {
  TORCH_CHECK(norm_type > 0, "the norm type of gradients must be positive, got ", norm_type);
  std::vector<at::Tensor> powers;
  for (const auto& bucket : gradients.buckets) powers.push_back(local_power(bucket, gradients.device, norm_type));
  reduce_values(powers, gradients.buckets, gradients.device, std::isinf(norm_type) ? ReduceOp::kMax : ReduceOp::kSum);
  at::Tensor total;
  for (const auto& power : powers) {
    if (!total.defined()) {
      total = power;
    } else {
      total = std::isinf(norm_type) ? at::maximum(total, power) : total + power;
    }
  }
  if (!total.defined()) return at::zeros({}, at::dtype(at::kFloat));
  if (norm_type == 2.0)
    total = total.sqrt();
  else if (!std::isinf(norm_type))
    total = total.pow(1.0 / norm_type);
  return total;
}

void scale_cpu(const at::Tensor& gradient, double factor) {
  if (!gradient.is_non_overlapping_and_dense()) {
    gradient.mul_(factor);
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, gradient.scalar_type(), "clip_grad_norm_", [&] {
    gradient_loops::multiply(gradient.mutable_data_ptr<scalar_t>(), gradient.numel(),
                             static_cast<at::opmath_type<scalar_t>>(factor));
  });
  if (!gradient.is_inference()) gradient.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

at::Tensor total_grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  const at::NoGradGuard no_grad;
  return norm_of(collect_gradients(parameters), norm_type).to(at::kFloat);
}

at::Tensor total_parameter_norm(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  return norm_of(collect_gradients(parameters, Part::kParameter), 2.0).to(at::kFloat);
}

at::Tensor count_zero_gradients(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  const Gradients found = collect_gradients(parameters);
  const auto none = at::dtype(at::kDouble).device(found.device);
  std::vector<at::Tensor> counts;
  for (const auto& bucket : found.buckets) {
    counts.push_back(at::zeros({}, none));
    for (const auto& gradient : bucket.gradients) counts.back() += gradient.numel() - at::count_nonzero(gradient);
  }
  reduce_values(counts, found.buckets, found.device, ReduceOp::kSum);
  at::Tensor total = at::zeros({}, none);
  for (const auto& count : counts) total += count;
  return total;
}

at::Tensor clip_factor(double max_norm, const at::Tensor& norm) {
  TORCH_CHECK(max_norm > 0, "gradients are clipped to a positive norm, got ", max_norm,
              ": call total_grad_norm to measure without clipping");
  const at::NoGradGuard no_grad;
  const at::Tensor wide = norm.to(at::kDouble);
  if (!wide.is_cpu()) return (max_norm / (wide + kEpsilon)).clamp_max(1.0);
  const double factor = max_norm / (*wide.const_data_ptr<double>() + kEpsilon);
  return at::scalar_tensor(factor < 1 ? factor : 1.0, wide.options());
}

void multiply_grads_(const std::vector<at::Tensor>& gradients, const at::Tensor& factor) {
  const at::NoGradGuard no_grad;
  if (gradients.empty()) return;
  if (factor.is_cpu()) {
    const double value = *factor.const_data_ptr<double>();
    if (value == 1) return;
    for (const auto& gradient : gradients) scale_cpu(gradient, value);
  } else {
    // Same dtype as the gradients: a scalar of another dtype costs a launch per gradient.
    const auto dtype = gradients.front().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    at::_foreach_mul_(gradients, factor.to(dtype));
  }
}

void clip_grads_with_norm_(const std::vector<at::Tensor>& gradients, double max_norm, const at::Tensor& norm) {
  multiply_grads_(gradients, clip_factor(max_norm, norm));
}

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  const at::NoGradGuard no_grad;
  const Gradients gradients = collect_gradients(parameters);
  const at::Tensor norm = norm_of(gradients, norm_type);
  for (const auto& bucket : gradients.buckets) {
    clip_grads_with_norm_(bucket.gradients, max_norm, norm);
  }
  return norm.to(at::kFloat);
}

}  // namespace megashard
