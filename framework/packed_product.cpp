#include "framework/packed_product.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "parallel/lanes/instructions.h"

namespace megashard {
namespace {

constexpr int64_t kPanel = 32;   // columns that are packed and multiplied at a time
constexpr int64_t kSteps = 128;  // products of one sum

/// A matrix with any strides.
struct Factor {
  const float* data;
  int64_t row, column;

  Factor from_row(int64_t first) const { return {data + first * row, row, column}; }
};

#define MEGASHARD_WITH_LANES "framework/packed_product.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

template <class T>
void multiply_panel(const Factor& a, const Factor& b, int64_t first, T* c, int64_t c_row, int64_t rows, int64_t depth,
                    T* scratch) {
  MEGASHARD_RUN(Panel, a, b, first, c, c_row, rows, depth, scratch);
}
#undef MEGASHARD_RUN

Factor factor(const at::Tensor& x) { return {x.const_data_ptr<float>(), x.stride(0), x.stride(1)}; }

/// Into how many blocks rows are divided: a block stays in the cache for all panels, and every thread has a few.
int64_t blocks_of_rows(int64_t rows, int64_t depth, int64_t panels) {
  constexpr int64_t kInCache = 1 << 18, kFewestRows = 96;
  const int64_t of_cache = rows / std::max(kFewestRows, kInCache / depth);
  const int64_t of_threads = at::get_num_threads() == 1 ? 1 : 4 * at::get_num_threads() / panels;
  return std::max<int64_t>(1, std::min(std::max(of_cache, of_threads), rows / (kFewestRows / 2)));
}

}  // namespace

bool takes_packed_product(const at::Tensor& a, const at::Tensor& b) {
  constexpr int64_t kFewest = 1 << 16, kMost = 1 << 27, kFewestRows = 3;
  const int64_t multiplications = a.size(0) * a.size(1) * b.size(1);
  return a.size(0) >= kFewestRows && b.size(1) >= kPanel && (b.stride(0) == 1 || b.stride(1) == 1) &&
         multiplications >= kFewest && multiplications <= kMost;
}

void packed_product_into(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b) {
  constexpr int64_t kGrain = 1 << 20;  // minimum number of multiplications per thread
  const int64_t rows = a.size(0), depth = a.size(1), columns = b.size(1), c_row = result.stride(0);
  const int64_t panels = (columns + kPanel - 1) / kPanel, blocks = blocks_of_rows(rows, depth, panels);
  const int64_t most_rows = (rows + blocks - 1) / blocks, scratch_floats = kPanel * (depth + most_rows);
  const Factor of_a = factor(a), of_b = factor(b);
  auto* const c = result.mutable_data_ptr<float>();
  const auto scratch =
      c10::GetCPUAllocator()->allocate(static_cast<size_t>(at::get_num_threads() * scratch_floats) * sizeof(float));
  const int64_t grain = 1 + kGrain / (most_rows * depth * kPanel);
  at::parallel_for(0, blocks * panels, grain, [&](int64_t begin, int64_t end) {
    auto* const packed = static_cast<float*>(scratch.get()) + at::get_thread_num() * scratch_floats;
    for (int64_t each = begin; each < end; ++each) {
      const int64_t first = rows * (each / panels) / blocks, last = rows * (each / panels + 1) / blocks;
      const int64_t column = each % panels * kPanel, left = columns - column;
      const Factor some = of_a.from_row(first);
      float* const to = c + first * c_row + column;
      if (left >= kPanel) {
        multiply_panel(some, of_b, column, to, c_row, last - first, depth, packed);
        continue;
      }
      float* const whole = packed + kPanel * depth;  // ends with the columns that are left
      multiply_panel(some, of_b, columns - kPanel, whole, kPanel, last - first, depth, packed);
      for (int64_t row = 0; row < last - first; ++row)
        std::copy_n(whole + (row + 1) * kPanel - left, left, to + row * c_row);
    }
  });
}

}  // namespace megashard
