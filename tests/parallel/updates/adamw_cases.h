#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "parallel/copies/batched_copy.h"
#include "parallel/updates/adamw_table.h"

namespace megashard::testing {

struct AdamWDtypes {
  at::ScalarType main = at::kFloat, gradient = at::kFloat, exp_avg = at::kFloat, exp_avg_sq = at::kFloat;
  at::ScalarType rounded = at::kByte;  ///< kByte: none
};

inline const std::vector<AdamWDtypes>& adamw_dtypes() {
  static const std::vector<AdamWDtypes> all{{},
                                            {.gradient = at::kBFloat16, .rounded = at::kBFloat16},
                                            {.gradient = at::kHalf, .rounded = at::kHalf},
                                            {.exp_avg = at::kBFloat16, .exp_avg_sq = at::kBFloat16},
                                            {.exp_avg = at::kHalf, .rounded = at::kBFloat16},
                                            {.gradient = at::kDouble},
                                            {at::kDouble, at::kDouble, at::kDouble, at::kDouble}};
  return all;
}

/// Shards of odd sizes, some not aligned for vectors; one gradient has an Inf and a NaN.
struct AdamWShards {
  std::vector<at::Tensor> main, gradient, exp_avg, exp_avg_sq, step, rounded;

  AdamWShards(const AdamWDtypes& dtypes, c10::Device device) {
    auto generator = at::detail::createCPUGenerator(5);
    int64_t shift = 0;
    for (const int64_t numel : {1, 7, 64, 1023, 0, 4096, 8197}) {
      const auto placed = [&](const at::Tensor& values, at::ScalarType dtype) {
        const at::Tensor memory = at::empty({numel + shift}, at::TensorOptions(device).dtype(dtype));
        return memory.narrow(0, shift, numel).copy_(values);
      };
      const auto normal = [&] { return at::randn({numel}, generator, at::TensorOptions(at::kCPU)); };
      main.push_back(placed(normal(), dtypes.main));
      at::Tensor slope = normal();
      if (numel == 64) slope[3] = INFINITY, slope[63] = NAN;
      gradient.push_back(placed(slope, dtypes.gradient));
      exp_avg.push_back(placed(normal() * 0.1, dtypes.exp_avg));
      exp_avg_sq.push_back(placed(normal().abs() * 0.1, dtypes.exp_avg_sq));
      step.push_back(at::full({}, static_cast<double>(numel % 5 + 1), at::TensorOptions(device).dtype(at::kFloat)));
      if (dtypes.rounded != at::kByte) rounded.push_back(placed(at::zeros({numel}), dtypes.rounded));
      shift = (shift + 1) % 4;
    }
  }

  std::vector<AdamWPiece> pieces() const {
    std::vector<AdamWPiece> all;
    for (size_t i = 0; i < main.size(); ++i) {
      const bool rounds = !rounded.empty();
      all.push_back({.main = main[i].mutable_data_ptr(),
                     .gradient = gradient[i].const_data_ptr(),
                     .exp_avg = exp_avg[i].mutable_data_ptr(),
                     .exp_avg_sq = exp_avg_sq[i].mutable_data_ptr(),
                     .step = step[i].const_data_ptr<float>(),
                     .rounded = rounds ? rounded[i].mutable_data_ptr() : nullptr,
                     .numel = main[i].numel(),
                     .first_tile = 0,
                     .main_format = float_format_of(main[i].scalar_type()),
                     .gradient_format = float_format_of(gradient[i].scalar_type()),
                     .exp_avg_format = float_format_of(exp_avg[i].scalar_type()),
                     .exp_avg_sq_format = float_format_of(exp_avg_sq[i].scalar_type()),
                     .rounded_format = rounds ? float_format_of(rounded[i].scalar_type()) : FloatFormat::kFloat,
                     .vectors = false});
    }
    return all;
  }

  /// All tensors that a step writes.
  std::vector<at::Tensor> written() const {
    std::vector<at::Tensor> all;
    for (const auto* list : {&main, &exp_avg, &exp_avg_sq, &rounded}) all.insert(all.end(), list->begin(), list->end());
    return all;
  }
};

/// Bit-identical, except for the bits of NaN.
inline bool same_numbers(const at::Tensor& one, const at::Tensor& other) {
  const at::Tensor a = one.cpu(), b = other.cpu();
  return (a.eq(b).logical_or(a.isnan().logical_and(b.isnan()))).all().item<bool>();
}

}  // namespace megashard::testing
