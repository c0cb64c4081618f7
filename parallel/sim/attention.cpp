// Attention operators of CUDA, computed by the CPU's flash attention.

#include <ATen/core/stack.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <limits>
#include <tuple>
#include <vector>

#include "parallel/device/device_plan.h"
#include "parallel/sim/tensor_memory.h"

namespace megashard::sim {
namespace {

using at::Tensor;

// at::SDPBackend.
constexpr int64_t kMath = 0, kFlash = 1, kEfficient = 2;

/// The CPU's choice, except that CUDA's flash attention takes no mask; its efficient one does.
int64_t choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
               double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const std::optional<Tensor> host_mask = mask && mask->defined() ? std::optional(host_alias(*mask)) : std::nullopt;
  // A GPU's flash attention supports dropout; the CPU's, which computes for it here, does not.
  if (device_is_planned()) dropout = 0;
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

/// A range of the tokens [tokens, heads, D] of flash attention, or of all rows [B, T, heads, D].
struct Document {
  Tensor heads_of(const Tensor& x) const {  // in the layout of the CPU's kernel
    return (x.dim() == 4 ? x : x.unsqueeze(0)).narrow(1, begin, length).transpose(1, 2);
  }
  Tensor lse_of(const Tensor& x) const { return (x.dim() == 3 ? x : x.unsqueeze(0)).narrow(2, begin, length); }

  int64_t begin, length;
};

struct Documents {
  Documents(const Tensor& rows, const std::optional<Tensor>& ends, std::optional<int64_t> before)
      : window(before.value_or(-1) + 1) {
    if (!ends || !ends->defined()) {
      all.push_back({0, rows.size(1)});
      return;
    }
    const auto* end = ends->const_data_ptr<int32_t>();
    for (int64_t i = 1; i < ends->numel(); ++i) all.push_back({end[i - 1], end[i] - end[i - 1]});
  }

  /// Bias on the scores of a document; unset: causal.
  std::optional<Tensor> bias(int64_t length, const Tensor& like) const {
    if (window == 0) return std::nullopt;
    const Tensor seen = at::ones({length, length}, like.options().dtype(at::kBool)).tril().triu(1 - window);
    return at::zeros({1, 1, length, length}, like.options())
        .masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  }

  std::vector<Document> all;
  int64_t window;  // 0: none
};

/// aten::_flash_attention_forward, which LibTorch's CPU lacks; only simulated-device tensors reach it, in order. Boxed,
/// because later versions append arguments.
void flash_of_documents(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const Tensor query = arguments[0].toTensor(), key = arguments[1].toTensor(), value = arguments[2].toTensor();
  const auto ends = arguments[3].toOptional<Tensor>();
  const double dropout = arguments[7].toDouble();
  const auto scale = arguments[10].toOptional<double>();
  const auto before = arguments[11].toOptional<int64_t>();
  TORCH_CHECK(dropout == 0, "the simulated device has no flash attention of documents with dropout");
  const Documents documents(query, ends, before);
  const Tensor out = at::empty(query.sizes(), query.options());
  std::vector<int64_t> sizes = {query.size(-2), query.size(-3)};
  if (query.dim() == 4) sizes.insert(sizes.begin(), query.size(0));
  const Tensor lse = at::empty(sizes, query.options().dtype(at::kFloat));
  for (const auto& document : documents.all) {
    const auto part = [&](const Tensor& x) { return document.heads_of(x); };
    const auto bias = documents.bias(document.length, query);
    const auto [of_part, lse_of_part] = at::_scaled_dot_product_flash_attention_for_cpu(
        part(query), part(key), part(value), dropout, /*is_causal=*/!bias, bias, scale);
    part(out).copy_(of_part);
    document.lse_of(lse).copy_(lse_of_part);
  }
  const auto nothing = [&] { return at::empty({0}, query.options()); };
  torch::jit::drop(*stack, count);
  torch::jit::push(*stack, out, lse, nothing(), nothing(), nothing());
}

std::tuple<Tensor, Tensor, Tensor> flash_of_documents_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& logsumexp, const Tensor& ends, const Tensor& /*key_ends*/, int64_t, int64_t, double dropout,
    bool /*causal*/, const Tensor&, const Tensor&, std::optional<double> scale, std::optional<int64_t> before,
    std::optional<int64_t> /*behind*/) {
  const Documents documents(query, ends, before);
  const Tensor of_query = at::empty_like(query), of_key = at::empty_like(key), of_value = at::empty_like(value);
  for (const auto& document : documents.all) {
    const auto part = [&](const Tensor& x) { return document.heads_of(x); };
    const auto bias = documents.bias(document.length, query);
    const auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        part(gradient), part(query), part(key), part(value), part(output), document.lse_of(logsumexp), dropout,
        /*is_causal=*/!bias, bias, scale);
    part(of_query).copy_(q);
    part(of_key).copy_(k);
    part(of_value).copy_(v);
  }
  return {of_query, of_key, of_value};
}

// scaled_dot_product_attention calls the stub, and falls back to formulas without one.
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

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_flash_attention_forward", torch::CppFunction::makeFromBoxedFunction<&megashard::sim::flash_of_documents>());
  m.impl("_flash_attention_backward", &megashard::sim::flash_of_documents_backward);
}
