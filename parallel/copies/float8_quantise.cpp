#include "parallel/copies/float8_quantise.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "parallel/copies/batched_copy.h"
#include "parallel/copies/float8_rows.h"
#include "parallel/device/cuda_module.h"

namespace megashard {
namespace {

bool aligned_to(const at::Tensor& tensor, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
}

/// Does the work of all device threads in one.
void quantise_on_host(const Float8Quantise& quantise) {
  with_format(quantise.format, [&](auto zero) {
    using From = decltype(zero);
    for (int64_t row = 0; row < quantise.scale_count; ++row) {
      quantise_in_thread<From>(quantise, row, amax_of_thread<From>(quantise, row, 0, 1), 0, 1);
    }
  });
}

void dequantise_on_host(const Float8Dequantise& dequantise) {
  with_format(dequantise.format, [&](auto zero) {
    for (int rank = 0; rank < dequantise.ranks; ++rank) dequantise_in_thread<decltype(zero)>(dequantise, rank, 0, 1);
  });
}

}  // namespace

void quantise_float8(const at::Tensor& rows, const at::Tensor& payload, const at::Tensor& scales, Float8Scale kind) {
  TORCH_CHECK(payload.scalar_type() == at::kFloat8_e4m3fn && payload.is_contiguous() &&
                  scales.scalar_type() == at::kFloat && scales.is_contiguous() && scales.numel() > 0 &&
                  payload.numel() % scales.numel() == 0 && rows.is_contiguous() && rows.numel() <= payload.numel(),
              "quantise_float8 takes contiguous rows, at least as many places for float8_e4m3fn and fp32 scales whose "
              "number divides that of the places, but got ",
              rows.sizes(), ", ", payload.scalar_type(), " ", payload.sizes(), " and ", scales.scalar_type(), " ",
              scales.sizes());
  const int64_t row_numel = payload.numel() / scales.numel();
  Float8Quantise quantise{
      .rows = rows.const_data_ptr(),
      .format = float_format_of(rows.scalar_type()),
      .power_of_two = kind == Float8Scale::kPowerOfTwo,
      .vectors = aligned_to(rows, 16) && aligned_to(payload, 8) && (scales.numel() == 1 || row_numel % 8 == 0),
      .numel = rows.numel(),
      .payload = static_cast<Float8Bits*>(payload.data_ptr()),
      .row_numel = row_numel,
      .scale_count = scales.numel(),
      .scales = scales.mutable_data_ptr<float>(),
      .amax = nullptr};
  if (payload.is_cpu()) return quantise_on_host(quantise);
  const c10::DeviceGuard guard(payload.device());
  at::Tensor amax;
  if (scales.numel() == 1) {
    amax = at::zeros({1}, payload.options().dtype(at::kInt));
    quantise.amax = static_cast<uint32_t*>(amax.data_ptr());
  }
  cuda_kernels().quantise(quantise);
}

void dequantise_float8(const at::Tensor& payloads, const at::Tensor& scales, int64_t dim, int64_t chunk_size,
                       const at::Tensor& whole) {
  TORCH_CHECK(payloads.scalar_type() == at::kFloat8_e4m3fn && payloads.dim() == 2 && payloads.stride(1) == 1 &&
                  scales.scalar_type() == at::kFloat && scales.dim() == 2 && scales.size(0) == payloads.size(0) &&
                  scales.stride(1) == 1 && scales.size(1) > 0 && payloads.size(1) % scales.size(1) == 0 &&
                  whole.is_contiguous(),
              "dequantise_float8 takes float8_e4m3fn [ranks, n], fp32 [ranks, m] where m divides n and a contiguous "
              "whole, but got ",
              payloads.scalar_type(), " ", payloads.sizes(), ", ", scales.scalar_type(), " ", scales.sizes(), " and ",
              whole.sizes());
  if (whole.numel() == 0) return;
  const int64_t runs = c10::multiply_integers(whole.sizes().slice(0, dim));
  const int64_t whole_run = whole.numel() / runs;
  const int64_t chunk_run = whole_run / whole.size(dim) * chunk_size;
  TORCH_CHECK(runs * chunk_run <= payloads.size(1), "a payload of ", payloads.size(1),
              " numbers cannot hold a chunk of ", runs * chunk_run);
  TORCH_CHECK(dim == 0 || chunk_size * payloads.size(0) == whole.size(dim), "dimension ", dim, " of ", whole.sizes(),
              " cannot be cut into ", payloads.size(0), " chunks of ", chunk_size, ": only dimension 0 may be uneven");
  TORCH_CHECK(scales.size(1) == 1 || payloads.size(1) <= UINT32_MAX, "a rank's payload of ", payloads.size(1),
              " numbers is too large for a scale a row: one scale for all has no limit");
  const int64_t row_numel = payloads.size(1) / scales.size(1);
  const bool side_by_side =
      chunk_run % 8 == 0 && (runs == 1 || whole_run % 8 == 0) && (scales.size(1) == 1 || row_numel % 8 == 0);
  const Float8Dequantise dequantise{
      .payload = static_cast<const Float8Bits*>(payloads.const_data_ptr()),
      .scales = scales.const_data_ptr<float>(),
      .payload_stride = payloads.stride(0),
      .scale_stride = scales.stride(0),
      .row_numel = row_numel,
      .ranks = static_cast<int32_t>(payloads.size(0)),
      .format = float_format_of(whole.scalar_type()),
      .vectors = side_by_side && payloads.stride(0) % 8 == 0 && aligned_to(payloads, 8) && aligned_to(whole, 16),
      .runs = runs,
      .chunk_run = chunk_run,
      .whole_run = whole_run,
      .whole = whole.data_ptr()};
  if (whole.is_cpu()) return dequantise_on_host(dequantise);
  const c10::DeviceGuard guard(whole.device());
  cuda_kernels().dequantise(dequantise);
}

}  // namespace megashard
