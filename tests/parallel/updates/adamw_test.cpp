#include "parallel/updates/adamw.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>

#include "parallel/lanes/instructions.h"
#include "tests/parallel/updates/adamw_cases.h"

namespace megashard::testing {
namespace {

AdamWNumbers numbers(const double* factor = nullptr, const float* skip = nullptr) {
  return {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .factor = factor, .skip = skip};
}

/// The kernel, its threads run sequentially.
void run_threads(std::vector<AdamWPiece> pieces, const AdamWNumbers& of) {
  make_adamw_tables(pieces, of, [](const AdamWTable& table) {
    for (int64_t tile = 0; tile < table.tiles; ++tile) {
      for (int thread = 0; thread < AdamWTable::kThreads; ++thread) adamw_tile(table, tile, thread);
    }
  });
}
void run_loops(std::vector<AdamWPiece> pieces, const AdamWNumbers& of) { adamw_step(pieces, of, c10::kCPU); }

/// The formula, in fp64.
void run_formula(AdamWShards& shards, const AdamWNumbers& of) {
  for (size_t i = 0; i < shards.main.size(); ++i) {
    const double t = shards.step[i].item<double>();
    const auto gradient = shards.gradient[i].to(at::kDouble) * (of.factor == nullptr ? 1 : *of.factor);
    const auto first = shards.exp_avg[i].to(at::kDouble) * of.beta1 + gradient * (1 - of.beta1);
    const auto second = shards.exp_avg_sq[i].to(at::kDouble) * of.beta2 + gradient * gradient * (1 - of.beta2);
    const auto denominator = (second / (1 - std::pow(of.beta2, t))).sqrt() + of.eps;
    const auto kept = shards.main[i].to(at::kDouble) * (1 - of.lr * of.weight_decay);
    const auto stepped = kept - first / (1 - std::pow(of.beta1, t)) / denominator * of.lr;
    shards.main[i].copy_(stepped);
    shards.exp_avg[i].copy_(first);
    shards.exp_avg_sq[i].copy_(second);
    if (!shards.rounded.empty()) shards.rounded[i].copy_(stepped);
  }
}

double unit_of(at::ScalarType dtype) {
  if (dtype == at::kDouble) return 0x1p-52;
  if (dtype == at::kFloat) return 0x1p-23;
  return dtype == at::kBFloat16 ? 0x1p-7 : 0x1p-10;
}

TEST(AdamW, IsTheFormula) {
  const double factor = 0.37;
  for (const auto& dtypes : adamw_dtypes()) {
    for (const auto run : {run_loops, run_threads}) {
      AdamWShards ours(dtypes, c10::kCPU), formula(dtypes, c10::kCPU);
      const auto gradients = ours.gradient;
      run(ours.pieces(), numbers(&factor));
      run_formula(formula, numbers(&factor));
      const auto got = ours.written(), expected = formula.written();
      for (size_t i = 0; i < got.size(); ++i) {
        // A few intermediate roundings of terms up to 4, and the rounding to the dtype.
        const double unit = unit_of(got[i].scalar_type()), on_the_way = unit_of(dtypes.main);
        EXPECT_TRUE(at::isclose(got[i].to(at::kDouble), expected[i].to(at::kDouble), unit, 4 * on_the_way, true)
                        .all()
                        .item<bool>())
            << dtypes.gradient << " " << dtypes.exp_avg << " tensor " << i;
      }
    }
  }
}

TEST(AdamW, TheKernelDoesAsItsTwinBitForBit) {
  if (best_instructions() == Instructions::kAnyCpu) GTEST_SKIP() << "without fused products the loops round twice";
  const double factor = 0.37;
  for (const auto& dtypes : adamw_dtypes()) {
    AdamWShards by_loops(dtypes, c10::kCPU), by_threads(dtypes, c10::kCPU);
    run_loops(by_loops.pieces(), numbers(&factor));
    run_threads(by_threads.pieces(), numbers(&factor));
    const auto one = by_loops.written(), other = by_threads.written();
    for (size_t i = 0; i < one.size(); ++i)
      EXPECT_TRUE(same_numbers(one[i], other[i])) << dtypes.gradient << " " << dtypes.exp_avg << " tensor " << i;
  }
}

TEST(AdamW, IsLibTorchsFusedKernel) {
  AdamWShards ours({}, c10::kCPU), theirs({}, c10::kCPU);
  for (int step = 0; step < 5; ++step) {
    run_loops(ours.pieces(), numbers());
    at::_fused_adamw_(theirs.main, theirs.gradient, theirs.exp_avg, theirs.exp_avg_sq, {}, theirs.step, 1e-2, 0.9, 0.95,
                      0.1, 1e-8, false, false);
    for (size_t i = 0; i < ours.main.size(); ++i) ours.step[i] += 1, theirs.step[i] += 1;
  }
  const auto one = ours.written(), other = theirs.written();
  // Five sums that are rounded once here and twice there: one unit in the last place of numbers up to 4.
  for (size_t i = 0; i < one.size(); ++i)
    EXPECT_TRUE(at::isclose(one[i], other[i], 2 * 0x1p-23, 4 * 0x1p-23, true).all().item<bool>()) << "tensor " << i;
}

TEST(AdamW, ASkippedStepChangesNothing) {
  const float skip = 1, go_on = 0;
  for (const auto run : {run_loops, run_threads}) {
    AdamWShards skipped({}, c10::kCPU), stepped({}, c10::kCPU), untouched({}, c10::kCPU);
    run(skipped.pieces(), numbers(nullptr, &skip));
    run(stepped.pieces(), numbers(nullptr, &go_on));
    const auto before = untouched.written(), after = skipped.written(), changed = stepped.written();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_numbers(before[i], after[i]));
    EXPECT_FALSE(same_numbers(before.front(), changed.front()));
  }
}

int launches_of(size_t count) {
  float value = 0;
  AdamWPiece piece{};
  piece.main = piece.exp_avg = piece.exp_avg_sq = &value;
  piece.gradient = piece.step = &value;
  piece.numel = 1;
  std::vector<AdamWPiece> pieces(count, piece);
  int launches = 0;
  make_adamw_tables(pieces, numbers(), [&](const AdamWTable&) { ++launches; });
  return launches;
}

TEST(AdamW, OneLaunchForAllOfAModelsParameters) {
  EXPECT_EQ(launches_of(0), 0);
  EXPECT_EQ(launches_of(AdamWTable::kCapacity), 1);
  EXPECT_EQ(launches_of(AdamWTable::kCapacity + 1), 2);
}

/// Counts bytes read and written.
struct CountedMemory {
  static inline int64_t bytes = 0;
  template <class Real, int kVector>
  static Vector<Real, kVector> load(const void* array, FloatFormat format, int64_t i) {
    bytes += kVector * size_of(format);
    return PlainMemory::load<Real, kVector>(array, format, i);
  }
  template <class Real, int kVector>
  static void store(void* array, FloatFormat format, int64_t i, const Vector<Real, kVector>& values) {
    bytes += kVector * size_of(format);
    PlainMemory::store(array, format, i, values);
  }
};

TEST(AdamW, TrafficIsWhatTheThreadsLoadAndStore) {
  for (const auto& dtypes : adamw_dtypes()) {
    AdamWShards shards(dtypes, c10::kCPU);
    auto pieces = shards.pieces();
    make_adamw_tables(pieces, numbers(), [](const AdamWTable& table) {
      CountedMemory::bytes = 0;
      for (int64_t tile = 0; tile < table.tiles; ++tile) {
        for (int thread = 0; thread < AdamWTable::kThreads; ++thread) adamw_tile<CountedMemory>(table, tile, thread);
      }
      EXPECT_EQ(CountedMemory::bytes, traffic_of(table).moved);
    });
  }
  AdamWPiece piece{};
  piece.numel = int64_t{1} << 26;
  const auto megabytes = [&] {
    int64_t moved = 0;
    make_adamw_tables({&piece, 1}, numbers(), [&](const AdamWTable& table) { moved = traffic_of(table).moved; });
    return moved / 1'000'000;
  };
  EXPECT_EQ(megabytes(), 1'879) << "docs/kernels.md";
  piece.gradient_format = piece.exp_avg_format = piece.exp_avg_sq_format = FloatFormat::kBFloat16;
  EXPECT_EQ(megabytes(), 1'207) << "docs/kernels.md";
}

}  // namespace
}  // namespace megashard::testing
