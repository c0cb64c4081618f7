// Attention as CUDA has it: kernels of its own, which here are the CPU's flash attention.

#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "parallel/sim/tensor_memory.h"

namespace megashard::sim {
namespace {

using at::Tensor;

// at::SDPBackend.
constexpr int64_t kMath = 0, kFlash = 1, kEfficient = 2;

/// What the CPU would choose; CUDA's flash attention takes no mask, its efficient one does.
int64_t choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
               double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const std::optional<Tensor> host_mask = mask && mask->defined() ? std::optional(host_alias(*mask)) : std::nullopt;
  const auto on_host = at::_fused_sdp_choice(host_alias(query), host_alias(key), host_alias(value), host_mask, dropout,
                                             causal, scale, grouped);
  if (on_host != kFlash) return kMath;
  return host_mask ? kEfficient : kFlash;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool causal, bool /*debug*/,
    std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, {}, scale);
  const auto seed = [&] { return at::empty({}, query.options().dtype(at::kLong)); };
  return {output, logsumexp, Tensor(), Tensor(), query.size(2), key.size(2), seed(), seed(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor& output, const Tensor& logsumexp,
                                                  const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                                                  double dropout, bool causal, const Tensor&, const Tensor&,
                                                  std::optional<double> scale) {
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(gradient, query, key, value, output, logsumexp,
                                                                  dropout, causal, {}, scale);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const std::optional<Tensor>& mask, bool /*logsumexp*/,
                                                     double dropout, bool causal, std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scale);
  const auto seed = [&] { return at::empty({}, query.options().dtype(at::kLong)); };
  return {output, logsumexp, seed(), seed()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& gradient, const Tensor& query,
                                                              const Tensor& key, const Tensor& value,
                                                              const Tensor& mask, const Tensor& output,
                                                              const Tensor& logsumexp, const Tensor&, const Tensor&,
                                                              double dropout, std::array<bool, 4>, bool causal,
                                                              std::optional<double> scale) {
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, output, logsumexp, dropout, causal,
      mask.defined() ? std::optional(mask) : std::nullopt, scale);
  return {of_query, of_key, of_value, Tensor()};
}

// scaled_dot_product_attention asks the stub, and computes by formulas where it has none.
const at::native::RegisterCUDADispatch<at::native::_fused_sdp_choice_stub_DECLARE_DISPATCH_type> choice_of_stub(
    at::native::_fused_sdp_choice_stub, &choice);

}  // namespace
}  // namespace megashard::sim

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_fused_sdp_choice", &megashard::sim::choice);
  m.impl("_scaled_dot_product_flash_attention", &megashard::sim::flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &megashard::sim::flash_backward);
  m.impl("_scaled_dot_product_efficient_attention", &megashard::sim::efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", &megashard::sim::efficient_backward);
}
