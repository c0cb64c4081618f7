#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <ostream>
#include <vector>

#include "parallel/copies/batched_copy.h"

namespace megashard::testing {

struct CopyCase {
  at::ScalarType from_dtype, to_dtype;
  int64_t rows, row_numel, numel, from_stride, to_stride;
  int64_t from_offset = 0;  // elements from an aligned address
  int64_t to_offset = 0;
  bool zero_rest = false;
};

inline std::ostream& operator<<(std::ostream& out, const CopyCase& each) {
  return out << each.from_dtype << " to " << each.to_dtype << ", rows " << each.rows << " of " << each.row_numel
             << ", numel " << each.numel << ", strides " << each.from_stride << " and " << each.to_stride
             << ", offsets " << each.from_offset << " and " << each.to_offset;
}

/// All pairs of dtypes, aligned and not, with rows that fit vectors and tiles and rows that do not.
inline std::vector<CopyCase> copy_cases() {
  std::vector<CopyCase> cases;
  const std::vector<at::ScalarType> floats{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  for (const auto from : floats) {
    for (const auto to : floats) {
      cases.push_back({from, to, 1, 1001, 1001, 0, 0});
      cases.push_back({from, to, 1, 70, 61, 0, 0, 1, 0, true});
      cases.push_back({from, to, 3, 48, 100, 64, 48, 0, 0, true});  // a row of four elements
      cases.push_back({from, to, 4, 17, 20, 17, 32, 0, 3, true});   // one of three, and empty ones
      cases.push_back({from, to, 2, 8, 0, 8, 8, 0, 0, true});       // only zeros
    }
  }
  cases.push_back({at::kFloat, at::kBFloat16, 2, 8192 + 9, 2 * 8192 + 11, 8208, 8208});
  cases.push_back({at::kByte, at::kByte, 2, 16384 + 5, 2 * 16384 + 10, 16400, 16389});
  cases.push_back({at::kFloat8_e4m3fn, at::kFloat8_e4m3fn, 3, 33, 99, 33, 48, 0, 2});
  cases.push_back({at::kLong, at::kLong, 2, 5, 9, 5, 6});
  cases.push_back({at::kFloat, at::kBFloat16, 1, 0, 0, 0, 0});
  return cases;
}

/// Buffers of the cases on a device, with the same bytes each time, which include all kinds of floats.
class CopyBuffers {
 public:
  explicit CopyBuffers(const std::vector<CopyCase>& cases, c10::Device device = c10::kCPU) {
    for (const CopyCase& each : cases) {
      from_.push_back(buffer(each.from_dtype, each.from_offset, each.from_stride, each).to(device));
      to_.push_back(buffer(each.to_dtype, each.to_offset, each.to_stride, each).to(device));
      const auto at = [](const at::Tensor& bytes, int64_t offset, at::ScalarType dtype) {
        return static_cast<char*>(bytes.data_ptr()) + offset * static_cast<int64_t>(c10::elementSize(dtype));
      };
      copies_.push_back({.from = at(from_.back(), each.from_offset, each.from_dtype),
                         .to = at(to_.back(), each.to_offset, each.to_dtype),
                         .from_dtype = each.from_dtype,
                         .to_dtype = each.to_dtype,
                         .rows = each.rows,
                         .row_numel = each.row_numel,
                         .numel = each.numel,
                         .from_stride = each.from_stride,
                         .to_stride = each.to_stride,
                         .zero_rest = each.zero_rest});
    }
  }

  const std::vector<RowsCopy>& copies() const { return copies_; }
  /// Bytes of a whole destination, including those between and after the rows.
  std::vector<uint8_t> to_bytes(size_t index) const {
    const at::Tensor bytes = to_[index].cpu();
    const auto* begin = bytes.const_data_ptr<uint8_t>();
    return {begin, begin + bytes.numel()};
  }

 private:
  static at::Tensor buffer(at::ScalarType dtype, int64_t offset, int64_t stride, const CopyCase& each) {
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
    const int64_t numel = offset + (each.rows - 1) * stride + each.row_numel + 5;
    const at::Tensor bytes = at::zeros({numel * element_bytes}, at::kByte);
    auto* begin = bytes.mutable_data_ptr<uint8_t>();
    // NaN bits depend on the hardware for conversions from or to fp64: no NaN there.
    const bool numbers = each.from_dtype == at::kDouble || each.to_dtype == at::kDouble;
    uint32_t state = 1;
    for (int64_t i = 0; i < bytes.numel(); ++i) {
      state = state * 1664525U + 1013904223U;
      begin[i] = static_cast<uint8_t>(state >> 24);
      if (numbers && i % element_bytes == element_bytes - 1) begin[i] &= 0xbfU;
    }
    return bytes;
  }

  std::vector<at::Tensor> from_, to_;
  std::vector<RowsCopy> copies_;
};

}  // namespace megashard::testing
