#include "parallel/updates/squares.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "parallel/copies/batched_copy.h"
#include "parallel/device/cuda_module.h"
#include "parallel/guarded_tensor.h"
#include "parallel/updates/squares_table.h"

namespace megashard {
namespace {

int64_t tiles_of(const at::Tensor& tensor) {
  return (tensor.numel() + SquaresTable::kTileNumel - 1) / SquaresTable::kTileNumel;
}

}  // namespace

int64_t make_squares_tables(const std::vector<at::Tensor>& dense, double* sums,
                            const std::function<void(const SquaresTable&)>& launch) {
  SquaresTable table;
  table.count = 0;
  table.tiles = 0;
  int64_t made = 0;
  const auto finish = [&] {
    if (table.count == 0) return;
    table.sums = sums + made;
    launch(table);
    made += table.tiles;
    table.count = 0;
    table.tiles = 0;
  };
  for (const auto& tensor : dense) {
    if (tensor.numel() == 0) continue;
    const FloatFormat format = float_format_of(tensor.scalar_type());
    const void* values = tensor.const_data_ptr();
    const int64_t bytes = SquaresTable::kVector * size_of(format);
    table.pieces[table.count++] = {
        .values = values,
        .numel = tensor.numel(),
        .first_tile = table.tiles,
        .format = format,
        .vectors = reinterpret_cast<uintptr_t>(values) % static_cast<uintptr_t>(bytes < 16 ? bytes : 16) == 0};
    table.tiles += static_cast<int32_t>(tiles_of(tensor));
    if (table.count == SquaresTable::kCapacity) finish();
  }
  finish();
  return made;
}

at::Tensor sum_of_squares(const std::vector<at::Tensor>& tensors) {
  const c10::DeviceGuard guard(tensors.front().device());
  std::vector<at::Tensor> dense;
  int64_t tiles = 0;
  for (const auto& tensor : tensors) {
    const at::Tensor plain = unguarded(tensor);
    dense.push_back(plain.is_non_overlapping_and_dense() ? plain : plain.contiguous());
    tiles += tiles_of(plain);
  }
  // The total follows the sums.
  const at::Tensor sums = at::empty({tiles + 1}, tensors.front().options().dtype(at::kDouble).requires_grad(false));
  auto* const data = sums.mutable_data_ptr<double>();
  make_squares_tables(dense, data, cuda_kernels().squares);
  cuda_kernels().squares_total({.sums = data, .total = data + tiles, .count = tiles});
  return sums.select(0, tiles);
}

}  // namespace megashard
