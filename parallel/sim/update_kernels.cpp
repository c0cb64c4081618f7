#include "parallel/sim/update_kernels.h"

#include <array>

#include "parallel/sim/arena.h"
#include "parallel/sim/operation.h"
#include "parallel/updates/adamw_table.h"
#include "parallel/updates/squares_table.h"

namespace megashard::sim {
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
