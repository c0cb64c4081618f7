#include "parallel/sequence_parallel/block_attention.h"

#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <array>
#include <limits>
#include <optional>

namespace megashard {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum class Kernel { kCpuFlash, kFlash, kEfficient };

Kernel kernel_for(const at::Tensor& q, const BlockMask& mask) {
  if (q.is_cpu()) return Kernel::kCpuFlash;
  TORCH_CHECK(q.is_cuda(), "ring attention has kernels for CPUs and for CUDA; its queries are on ", q.device());
  return has_flash_kernel(q) && !mask.allowed.defined() ? Kernel::kFlash : Kernel::kEfficient;
}

/// Bias added to the scores. Memory-efficient attention needs rows that begin at multiples of 16 elements.
std::optional<at::Tensor> bias_of(const BlockMask& mask, const at::Tensor& q) {
  if (!mask.allowed.defined()) return std::nullopt;
  const auto& allowed = mask.allowed;
  const int64_t keys = allowed.size(3), aligned = (keys + 15) / 16 * 16;
  const at::Tensor bias = at::zeros({allowed.size(0), 1, allowed.size(2), aligned}, q.options()).narrow(3, 0, keys);
  bias.masked_fill_(allowed.logical_not(), -kInfinity);
  return bias.expand({q.size(0), q.size(1), q.size(2), keys});
}

/// Repeats each key head for its query heads: memory-efficient attention has no grouped heads.
at::Tensor spread(const at::Tensor& keys, const at::Tensor& q) {
  const int64_t groups = keys.size(1), shared = q.size(1) / groups;
  if (shared == 1) return keys;
  return keys.unsqueeze(2).expand({-1, -1, shared, -1, -1}).flatten(1, 2);
}

/// Sums the gradients of each key head.
at::Tensor gathered(const at::Tensor& gradient, const at::Tensor& keys) {
  const int64_t groups = keys.size(1);
  if (gradient.size(1) == groups) return gradient;
  return gradient.unflatten(1, {groups, -1}).sum(2, /*keepdim=*/false, accumulated_dtype(gradient));
}

/// Log-sum-exp as memory-efficient attention reads it: row lengths padded to a multiple of 32 with infinity.
at::Tensor aligned_lse(const at::Tensor& lse) {
  const int64_t missing = (32 - lse.size(2) % 32) % 32;
  return missing == 0 ? lse.contiguous() : at::constant_pad_nd(lse, {0, missing}, kInfinity);
}

/// For kernels that take a dropout state, without dropout.
at::Tensor no_seed(const at::Tensor& q) { return at::empty({2}, q.options().dtype(at::kLong)); }

/// Kernels differ in their results for a query without keys.
void mark_blind_queries(BlockAttention& block, const at::Tensor& allowed) {
  const at::Tensor blind = allowed.any(3).logical_not();  // [B or 1, 1, queries or 1]
  block.out.masked_fill_(blind.unsqueeze(3), 0);
  block.lse.masked_fill_(blind, kNoKey);
}

}  // namespace

bool has_flash_kernel(const at::Tensor& q) {
  const bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  return q.is_cuda() && half && q.size(3) <= 256;
}

at::ScalarType accumulated_dtype(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

BlockAttention attend_block(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockMask& mask,
                            double scale) {
  const auto bias = bias_of(mask, q);
  BlockAttention block;
  switch (kernel_for(q, mask)) {
    case Kernel::kCpuFlash:
      std::tie(block.out, block.lse) =
          at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout_p=*/0, mask.causal, bias, scale);
      break;
    case Kernel::kFlash: {
      const auto result = at::_scaled_dot_product_flash_attention(q, k, v, /*dropout_p=*/0, mask.causal,
                                                                  /*return_debug_mask=*/false, scale);
      block = {std::get<0>(result), std::get<1>(result)};
      break;
    }
    case Kernel::kEfficient: {
      const auto result = at::_scaled_dot_product_efficient_attention(
          q, spread(k, q), spread(v, q), bias, /*compute_log_sumexp=*/true, /*dropout_p=*/0, mask.causal, scale);
      block = {std::get<0>(result), std::get<1>(result).narrow(2, 0, q.size(2))};
      break;
    }
  }
  if (mask.allowed.defined()) mark_blind_queries(block, mask.allowed);
  return block;
}

BlockGradients attend_block_backward(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v, const BlockAttention& whole, const BlockMask& mask,
                                     double scale) {
  const auto bias = bias_of(mask, q);
  BlockGradients gradients;
  switch (kernel_for(q, mask)) {
    case Kernel::kCpuFlash:
      std::tie(gradients.q, gradients.k, gradients.v) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          grad_out, q, k, v, whole.out, whole.lse, /*dropout_p=*/0, mask.causal, bias, scale);
      break;
    case Kernel::kFlash:
      std::tie(gradients.q, gradients.k, gradients.v) = at::_scaled_dot_product_flash_attention_backward(
          grad_out, q, k, v, whole.out, whole.lse.contiguous(), /*cum_seq_q=*/at::Tensor(), /*cum_seq_k=*/at::Tensor(),
          q.size(2), k.size(2), /*dropout_p=*/0, mask.causal, no_seed(q), no_seed(q), scale);
      break;
    case Kernel::kEfficient: {
      const auto result = at::_scaled_dot_product_efficient_attention_backward(
          grad_out, q, spread(k, q), spread(v, q), bias.value_or(at::Tensor()), whole.out, aligned_lse(whole.lse),
          no_seed(q), no_seed(q), /*dropout_p=*/0, {true, true, true, false}, mask.causal, scale);
      gradients = {std::get<0>(result), gathered(std::get<1>(result), k), gathered(std::get<2>(result), v)};
      break;
    }
  }
  return gradients;
}

}  // namespace megashard
