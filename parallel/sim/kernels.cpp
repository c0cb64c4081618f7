#include "parallel/sim/kernels.h"

#include <algorithm>
#include <array>

#include "parallel/copies/copy_table.h"
#include "parallel/copies/float8_rows.h"
#include "parallel/sim/arena.h"
#include "parallel/sim/operation.h"
#include "parallel/updates/adamw_table.h"
#include "parallel/updates/squares_table.h"

namespace megashard::sim {
namespace {

size_t bytes_of(FloatFormat format) { return static_cast<size_t>(size_of(format)); }

template <class T>
T* mirror_of(T* address) {
  return reinterpret_cast<T*>(Arena::get().reachable(address));
}

void copy_rows(const CopyTable& table) {
  Operation operation(SimDevice::at(current_device()), "copy_kernel");
  CopyTable on_mirror = table;
  for (int i = 0; i < table.count; ++i) {
    const CopyTable::Piece& piece = table.pieces[i];
    const int64_t past = i + 1 < table.count ? table.pieces[i + 1].first_tile : table.tiles;
    const int64_t rows = (past - piece.first_tile) / piece.tiles_per_row;
    const size_t from_bytes = piece.converts ? bytes_of(piece.from_format) : 1;
    const size_t to_bytes = piece.converts ? bytes_of(piece.to_format) : 1;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t count = std::clamp<int64_t>(piece.numel - row * piece.row_numel, 0, piece.row_numel);
      const auto* from =
          static_cast<const char*>(piece.from) + row * piece.from_stride * static_cast<int64_t>(from_bytes);
      const auto* to = static_cast<const char*>(piece.to) + row * piece.to_stride * static_cast<int64_t>(to_bytes);
      operation.reads(from, static_cast<size_t>(count) * from_bytes);
      operation.writes(to, static_cast<size_t>(piece.zero_rest ? piece.row_numel : count) * to_bytes);
    }
    on_mirror.pieces[i].from = mirror_of(piece.from);
    on_mirror.pieces[i].to = mirror_of(piece.to);
  }
  operation.run([table = on_mirror] {
    for (int64_t tile = 0; tile < table.tiles; ++tile) {
      for (int thread = 0; thread < CopyTable::kThreads; ++thread) copy_tile(table, tile, thread);
    }
  });
}

void quantise(const Float8Quantise& asked) {
  Operation operation(SimDevice::at(current_device()), "quantise_kernel");
  operation.reads(asked.rows, static_cast<size_t>(asked.numel) * bytes_of(asked.format));
  operation.writes(asked.payload, static_cast<size_t>(asked.scale_count * asked.row_numel));
  operation.writes(asked.scales, static_cast<size_t>(asked.scale_count) * sizeof(float));
  if (asked.amax != nullptr) operation.writes(asked.amax, sizeof(uint32_t));
  Float8Quantise quantise = asked;
  quantise.rows = mirror_of(asked.rows);
  quantise.payload = mirror_of(asked.payload);
  quantise.scales = mirror_of(asked.scales);
  if (asked.amax != nullptr) quantise.amax = mirror_of(asked.amax);
  operation.run([quantise] {
    with_format(quantise.format, [&](auto zero) {
      using From = decltype(zero);
      for (int64_t row = 0; row < quantise.scale_count; ++row) {
        uint32_t amax = amax_of_thread<From>(quantise, row, 0, 1);
        if (quantise.amax != nullptr) amax = *quantise.amax = std::max(*quantise.amax, amax);
        quantise_in_thread<From>(quantise, row, amax, 0, 1);
      }
    });
  });
}

void dequantise(const Float8Dequantise& asked) {
  Operation operation(SimDevice::at(current_device()), "dequantise_kernel");
  const int64_t of_rank = asked.runs * asked.chunk_run;
  for (int rank = 0; rank < asked.ranks; ++rank) {
    operation.reads(asked.payload + rank * asked.payload_stride, static_cast<size_t>(of_rank));
    const int64_t scales = of_rank > asked.row_numel ? (of_rank + asked.row_numel - 1) / asked.row_numel : 1;
    operation.reads(asked.scales + rank * asked.scale_stride, static_cast<size_t>(scales) * sizeof(float));
  }
  operation.writes(asked.whole, static_cast<size_t>(asked.runs * asked.whole_run) * bytes_of(asked.format));
  Float8Dequantise dequantise = asked;
  dequantise.payload = mirror_of(asked.payload);
  dequantise.scales = mirror_of(asked.scales);
  dequantise.whole = mirror_of(asked.whole);
  operation.run([dequantise] {
    with_format(dequantise.format, [&](auto zero) {
      for (int rank = 0; rank < dequantise.ranks; ++rank) dequantise_in_thread<decltype(zero)>(dequantise, rank, 0, 1);
    });
  });
}

}  // namespace

CudaKernels kernels_of_module() {
  return {.copy = copy_rows,
          .quantise = quantise,
          .dequantise = dequantise,
          .adamw = adamw,
          .squares = squares,
          .squares_total = squares_total};
}

namespace {

template <class T>
void to_mirror(T*& address) {
  if (address != nullptr) address = reinterpret_cast<T*>(Arena::get().reachable(address));
}

size_t bytes_of(FloatFormat format, int64_t numel) { return static_cast<size_t>(size_of(format) * numel); }

/// Sum over a block's threads; `of_thread` returns each thread's part.
template <class OfThread>
double sum_of_block(const OfThread& of_thread) {
  std::array<double, SquaresTable::kThreads> sums;
  for (int thread = 0; thread < SquaresTable::kThreads; ++thread) sums[static_cast<size_t>(thread)] = of_thread(thread);
  for (int distance = SquaresTable::kThreads / 2; distance > 0; distance /= 2) {
    for (int thread = 0; thread < distance; ++thread) add_partner(sums.data(), distance, thread);
  }
  return sums[0];
}

}  // namespace

void adamw(const AdamWTable& asked) {
  Operation operation(SimDevice::at(current_device()), "adamw_kernel");
  AdamWTable table = asked;
  if (table.numbers.factor != nullptr) operation.reads(table.numbers.factor, sizeof(double));
  if (table.numbers.skip != nullptr) operation.reads(table.numbers.skip, sizeof(float));
  to_mirror(table.numbers.factor);
  to_mirror(table.numbers.skip);
  for (int i = 0; i < table.count; ++i) {
    AdamWPiece& piece = table.pieces[i];
    operation.reads(piece.gradient, bytes_of(piece.gradient_format, piece.numel));
    operation.reads(piece.step, sizeof(float));
    const auto changes = [&](void*& array, FloatFormat format, bool reads) {
      if (array == nullptr) return;
      if (reads) operation.reads(array, bytes_of(format, piece.numel));
      operation.writes(array, bytes_of(format, piece.numel));
      to_mirror(array);
    };
    changes(piece.main, piece.main_format, true);
    changes(piece.exp_avg, piece.exp_avg_format, true);
    changes(piece.exp_avg_sq, piece.exp_avg_sq_format, true);
    changes(piece.rounded, piece.rounded_format, false);
    to_mirror(piece.gradient);
    to_mirror(piece.step);
  }
  operation.run([table] {
    for (int64_t tile = 0; tile < table.tiles; ++tile) {
      for (int thread = 0; thread < AdamWTable::kThreads; ++thread) adamw_tile(table, tile, thread);
    }
  });
}

void squares(const SquaresTable& asked) {
  Operation operation(SimDevice::at(current_device()), "squares_kernel");
  SquaresTable table = asked;
  for (int i = 0; i < table.count; ++i) {
    operation.reads(table.pieces[i].values, bytes_of(table.pieces[i].format, table.pieces[i].numel));
    to_mirror(table.pieces[i].values);
  }
  operation.writes(table.sums, sizeof(double) * static_cast<size_t>(table.tiles));
  to_mirror(table.sums);
  operation.run([table] {
    for (int64_t tile = 0; tile < table.tiles; ++tile)
      table.sums[tile] = sum_of_block([&](int thread) { return squares_of_thread(table, tile, thread); });
  });
}

void squares_total(const SquaresTotal& asked) {
  Operation operation(SimDevice::at(current_device()), "squares_total_kernel");
  SquaresTotal of = asked;
  operation.reads(of.sums, sizeof(double) * static_cast<size_t>(of.count));
  operation.writes(of.total, sizeof(double));
  to_mirror(of.sums);
  to_mirror(of.total);
  operation.run([of] { *of.total = sum_of_block([&](int thread) { return total_of_thread(of, thread); }); });
}

}  // namespace megashard::sim
