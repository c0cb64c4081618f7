#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "parallel/copies/float_formats.h"
#include "parallel/copies/tiles.h"
#include "parallel/copies/traffic.h"
#include "parallel/updates/plain_memory.h"

/// Arguments of one AdamW launch over many shards, and the code of its threads. Compiled by nvcc for the kernel and by
/// the host's compiler for fp64, for the simulated device and for tests.
namespace megashard {

/// One shard: dense arrays of `numel` elements. `main` is fp32 or fp64, which is also the compute dtype of the piece.
struct AdamWPiece {
  void* main;
  const void* gradient;
  void* exp_avg;
  void* exp_avg_sq;
  const float* step;  ///< step number, from 1
  void* rounded;      ///< receives main, rounded; null: none
  int64_t numel;
  int32_t first_tile;
  FloatFormat main_format;
  FloatFormat gradient_format;
  FloatFormat exp_avg_format;
  FloatFormat exp_avg_sq_format;
  FloatFormat rounded_format;
  bool vectors;  ///< all arrays are aligned for 4-element access
};

/// Hyperparameters of a parameter group.
struct AdamWNumbers {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  const double* factor;  ///< multiplies gradients; null: 1
  const float* skip;     ///< 1: change nothing; null: 0
};

/// Fits the 32,764 bytes of kernel parameters allowed since CUDA 12.1.
struct AdamWTable {
  static constexpr int kCapacity = 453;
  static constexpr int kThreads = 256;
  static constexpr int kVector = 4;
  static constexpr int64_t kTileNumel = int64_t{4} * kVector * kThreads;

  AdamWPiece pieces[kCapacity];
  AdamWNumbers numbers;
  int32_t count;
  int32_t tiles;
};
static_assert(sizeof(AdamWTable) <= 32764);

constexpr double whole_power(double base, int64_t exponent) {
  double power = 1;
  for (; exponent > 0; exponent /= 2, base *= base) {
    if (exponent % 2 == 1) power *= base;
  }
  return power;
}

/// One AdamW step in Real, as in torch's fused kernels. std::fma stands for the only fused operations, so all devices
/// round identically.
template <class Real>
struct AdamWCoefficients {
  Real factor, decay, from_gradient, beta2, from_square, step_size, root, eps;

  constexpr AdamWCoefficients(const AdamWNumbers& of, float step)
      : factor(of.factor == nullptr ? Real(1) : static_cast<Real>(*of.factor)),
        decay(static_cast<Real>(1 - of.lr * of.weight_decay)),
        from_gradient(static_cast<Real>(1 - of.beta1)),
        beta2(static_cast<Real>(of.beta2)),
        from_square(static_cast<Real>(1 - of.beta2)),
        step_size(static_cast<Real>(of.lr / (1 - whole_power(of.beta1, static_cast<int64_t>(step))))),
        root(static_cast<Real>(std::sqrt(1 - whole_power(of.beta2, static_cast<int64_t>(step))))),
        eps(static_cast<Real>(of.eps)) {}

  constexpr void update(Real& main, Real raw_gradient, Real& exp_avg, Real& exp_avg_sq) const {
    const Real gradient = raw_gradient * factor;
    const Real difference = std::fma(raw_gradient, factor, -exp_avg);
    exp_avg = from_gradient < Real(0.5) ? std::fma(from_gradient, difference, exp_avg)
                                        : std::fma(from_gradient - 1, difference, gradient);
    exp_avg_sq = std::fma(from_square * gradient, gradient, beta2 * exp_avg_sq);
    main = std::fma(main, decay, -(step_size * exp_avg / (std::sqrt(exp_avg_sq) / root + eps)));
  }
};

/// Updates kVector elements starting at i.
template <class Memory, class Real, int kVector>
constexpr void adamw_at(const AdamWPiece& piece, const AdamWCoefficients<Real>& coefficients, int64_t i) {
  const auto gradient = Memory::template load<Real, kVector>(piece.gradient, piece.gradient_format, i);
  auto main = Memory::template load<Real, kVector>(piece.main, piece.main_format, i);
  auto exp_avg = Memory::template load<Real, kVector>(piece.exp_avg, piece.exp_avg_format, i);
  auto exp_avg_sq = Memory::template load<Real, kVector>(piece.exp_avg_sq, piece.exp_avg_sq_format, i);
  for (int k = 0; k < kVector; ++k)
    coefficients.update(main.values[k], gradient.values[k], exp_avg.values[k], exp_avg_sq.values[k]);
  Memory::store(piece.main, piece.main_format, i, main);
  Memory::store(piece.exp_avg, piece.exp_avg_format, i, exp_avg);
  Memory::store(piece.exp_avg_sq, piece.exp_avg_sq_format, i, exp_avg_sq);
  if (piece.rounded != nullptr) Memory::store(piece.rounded, piece.rounded_format, i, main);
}

/// Updates elements [begin, end) of a piece; thread `thread` of `threads`.
template <class Memory, class Real>
constexpr void adamw_part(const AdamWPiece& piece, const AdamWNumbers& numbers, int64_t begin, int64_t end, int thread,
                          int threads) {
  constexpr int kVector = std::is_same_v<Real, float> ? AdamWTable::kVector : 1;
  const AdamWCoefficients<Real> coefficients(numbers, *piece.step);
  const int64_t whole_vectors = piece.vectors ? begin + (end - begin) / kVector * kVector : begin;
  for (int64_t i = begin + thread * kVector; i < whole_vectors; i += int64_t{kVector} * threads)
    adamw_at<Memory, Real, kVector>(piece, coefficients, i);
  for (int64_t i = whole_vectors + thread; i < end; i += threads) adamw_at<Memory, Real, 1>(piece, coefficients, i);
}

/// Body of thread `thread` in block `tile` of the launch.
template <class Memory = PlainMemory>
constexpr void adamw_tile(const AdamWTable& table, int64_t tile, int thread) {
  if (table.numbers.skip != nullptr && *table.numbers.skip == 1) return;
  const AdamWPiece& piece = table.pieces[piece_of_tile(table.pieces, table.count, tile)];
  const int64_t begin = (tile - piece.first_tile) * AdamWTable::kTileNumel;
  const int64_t end = begin + AdamWTable::kTileNumel < piece.numel ? begin + AdamWTable::kTileNumel : piece.numel;
  if (piece.main_format == FloatFormat::kDouble) {
    adamw_part<Memory, double>(piece, table.numbers, begin, end, thread, AdamWTable::kThreads);
  } else {
    adamw_part<Memory, float>(piece, table.numbers, begin, end, thread, AdamWTable::kThreads);
  }
}

constexpr Traffic traffic_of(const AdamWTable& table) {
  int64_t bytes = 0;
  for (int i = 0; i < table.count; ++i) {
    const AdamWPiece& piece = table.pieces[i];
    const int64_t kept = size_of(piece.main_format) + size_of(piece.exp_avg_format) + size_of(piece.exp_avg_sq_format);
    const int64_t rounded = piece.rounded == nullptr ? 0 : size_of(piece.rounded_format);
    bytes += piece.numel * (2 * kept + size_of(piece.gradient_format) + rounded);
  }
  return {.moved = bytes, .again = 0, .least = bytes};
}

}  // namespace megashard
