#include "parallel/updates/adamw.h"

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "parallel/device/cuda_module.h"
#include "parallel/device/device_plan.h"
#include "parallel/lanes/instructions.h"

namespace megashard {

namespace adamw_loops {
namespace {

#define MEGASHARD_WITH_LANES "parallel/updates/adamw_loops.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

template <class T>
void run(const AdamWPiece& piece, const AdamWCoefficients<float>& coefficients, int64_t begin, int64_t end) {
  MEGASHARD_RUN(AdamWPart, piece, coefficients, begin, end)
}
#undef MEGASHARD_RUN

/// Steps elements [begin, end) of a piece.
void step_part(const AdamWPiece& piece, const AdamWNumbers& numbers, int64_t begin, int64_t end) {
  if (piece.main_format == FloatFormat::kDouble)
    return adamw_part<PlainMemory, double>(piece, numbers, begin, end, /*thread=*/0, /*threads=*/1);
  const AdamWCoefficients<float> coefficients(numbers, *piece.step);
  switch (piece.gradient_format) {
    case FloatFormat::kFloat:
      return run<float>(piece, coefficients, begin, end);
    case FloatFormat::kBFloat16:
      return run<c10::BFloat16>(piece, coefficients, begin, end);
    case FloatFormat::kHalf:
      return run<c10::Half>(piece, coefficients, begin, end);
    case FloatFormat::kDouble:
      return adamw_part<PlainMemory, float>(piece, numbers, begin, end, /*thread=*/0, /*threads=*/1);
  }
}

}  // namespace
}  // namespace adamw_loops

namespace {

constexpr int64_t kElementsOfAThread = int64_t{1} << 15;

/// Bytes that a step reads and writes.
int64_t bytes_moved(std::span<const AdamWPiece> pieces) {
  int64_t bytes = 0;
  for (const AdamWPiece& piece : pieces) {
    int64_t each = size_of(piece.gradient_format) + 2 * size_of(piece.main_format);
    if (piece.exp_avg != nullptr) each += 2 * size_of(piece.exp_avg_format);
    if (piece.exp_avg_sq != nullptr) each += 2 * size_of(piece.exp_avg_sq_format);
    if (piece.rounded != nullptr) each += size_of(piece.rounded_format);
    bytes += each * piece.numel;
  }
  return bytes;
}

void step_on_host(std::span<const AdamWPiece> pieces, const AdamWNumbers& numbers) {
  if (plan_host_pass(bytes_moved(pieces))) return;
  if (numbers.skip != nullptr && *numbers.skip == 1) return;
  int64_t all = 0;
  for (const AdamWPiece& piece : pieces) all += piece.numel;
  at::parallel_for(0, all, kElementsOfAThread, [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const AdamWPiece& piece : pieces) {
      const int64_t from = std::max<int64_t>(begin - first, 0), to = std::min(end - first, piece.numel);
      if (from < to) adamw_loops::step_part(piece, numbers, from, to);
      first += piece.numel;
    }
  });
}

bool takes_vectors(const AdamWPiece& piece) {
  const auto fits = [](const void* array, FloatFormat format) {
    const auto bytes = static_cast<uintptr_t>(std::min<int64_t>(AdamWTable::kVector * size_of(format), 16));
    return reinterpret_cast<uintptr_t>(array) % bytes == 0;
  };
  return fits(piece.main, piece.main_format) && fits(piece.gradient, piece.gradient_format) &&
         fits(piece.exp_avg, piece.exp_avg_format) && fits(piece.exp_avg_sq, piece.exp_avg_sq_format) &&
         fits(piece.rounded, piece.rounded_format);
}

}  // namespace

void make_adamw_tables(std::span<AdamWPiece> pieces, const AdamWNumbers& numbers,
                       const std::function<void(const AdamWTable&)>& launch) {
  AdamWTable table;
  table.numbers = numbers;
  table.count = 0;
  table.tiles = 0;
  for (AdamWPiece& piece : pieces) {
    if (piece.numel == 0) continue;
    piece.first_tile = table.tiles;
    piece.vectors = takes_vectors(piece);
    table.pieces[table.count++] = piece;
    table.tiles += static_cast<int32_t>((piece.numel + AdamWTable::kTileNumel - 1) / AdamWTable::kTileNumel);
    if (table.count < AdamWTable::kCapacity) continue;
    launch(table);
    table.count = 0;
    table.tiles = 0;
  }
  if (table.count > 0) launch(table);
}

void adamw_step(std::span<AdamWPiece> pieces, const AdamWNumbers& numbers, c10::Device device) {
  if (device.is_cpu()) return step_on_host(pieces, numbers);
  const c10::DeviceGuard guard(device);
  make_adamw_tables(pieces, numbers, cuda_kernels().adamw);
}

}  // namespace megashard
