#include "parallel/copies/float8_quantise.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "parallel/copies/float8_rows.h"
#include "tests/support/message_of.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;

at::Tensor normal(at::IntArrayRef sizes, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator);
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Quantised {
  explicit Quantised(const at::Tensor& rows, int64_t places = -1, Float8Scale kind = Float8Scale::kAmax,
                     int64_t scale_count = 1)
      : payload(at::full({places < 0 ? rows.numel() : places}, 99, at::kByte).view(at::kFloat8_e4m3fn)),
        scales(at::zeros({scale_count})) {
    quantise_float8(rows, payload, scales, kind);
  }
  at::Tensor bytes() const { return payload.view(at::kByte); }
  float number() const { return scales.item<float>(); }
  at::Tensor rebuilt() const {
    const at::Tensor whole = at::empty({payload.numel()});
    dequantise_float8(payload.view({1, -1}), scales.view({1, -1}), 0, payload.numel(), whole);
    return whole;
  }

  at::Tensor payload, scales;
};

TEST(Float8Quantise, IsTheCastOfLibTorchAfterScaling) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor rows = (normal({37, 5}, 3) * 20).to(dtype);
    const Quantised ours(rows);
    const at::Tensor numbers = rows.to(at::kFloat).view({-1});
    const float scale = at::abs(numbers).max().item<float>() / 448;
    EXPECT_EQ(ours.number(), scale);
    const at::Tensor theirs = (numbers * (1 / scale)).to(at::kFloat8_e4m3fn);
    EXPECT_TRUE(at::equal(ours.bytes(), theirs.view(at::kByte))) << dtype;
    EXPECT_EQ(at::abs(ours.payload.to(at::kFloat)).max().item<float>(), 448);
    EXPECT_TRUE(at::equal(ours.rebuilt(), theirs.to(at::kFloat) * scale)) << dtype;
  }
}

TEST(Float8Quantise, PowersOfTwoKeepNumbersThatTheFormatHas) {
  const at::Tensor rows = at::tensor({3.25F, -0.5F, 0.001953125F, 0.0F, 100.0F});
  const Quantised ours(rows, -1, Float8Scale::kPowerOfTwo);
  EXPECT_EQ(ours.number(), 0.25F);  // 100 / 448 is above 1/8
  EXPECT_TRUE(at::equal(ours.rebuilt(), at::tensor({3.25F, -0.5F, 0.001953125F, 0.0F, 96.0F})));
  EXPECT_EQ(Quantised(at::tensor({-448.0F}), -1, Float8Scale::kPowerOfTwo).number(), 1.0F);
}

TEST(Float8Quantise, ZerosNothingAndTheSmallestNumbers) {
  EXPECT_TRUE(at::equal(Quantised(at::zeros({9})).rebuilt(), at::zeros({9})));
  const Quantised none(at::empty({0, 4}), 8);
  EXPECT_TRUE(at::equal(none.bytes(), at::zeros({8}, at::kByte)));
  EXPECT_TRUE(at::equal(none.rebuilt(), at::zeros({8})));
  const float smallest = std::numeric_limits<float>::denorm_min();
  EXPECT_TRUE(std::isfinite(Quantised(at::full({3}, smallest)).rebuilt().sum().item<float>()));
  const float largest = std::numeric_limits<float>::max();
  EXPECT_NEAR(Quantised(at::full({3}, -largest)).rebuilt()[0].item<double>() / largest, -1, 1e-6);
}

TEST(Float8Quantise, PlacesAfterTheRowsAreZero) {
  const Quantised ours(normal({3, 7}, 1), 24);
  EXPECT_TRUE(at::equal(ours.bytes().narrow(0, 21, 3), at::zeros({3}, at::kByte)));
}

TEST(Float8Quantise, InfinityAndNanMakeAllNan) {
  for (const float bad : {kInfinity, -kInfinity, std::nanf("")}) {
    const at::Tensor rows = at::tensor({1.0F, 0.0F, bad, 2.0F});
    for (const auto kind : {Float8Scale::kAmax, Float8Scale::kPowerOfTwo})
      EXPECT_TRUE(at::isnan(Quantised(rows, -1, kind).rebuilt()).all().item<bool>()) << bad;
  }
}

TEST(Float8Quantise, EachRowHasItsScale) {
  for (const int64_t width : {5, 8, 32}) {
    const at::Tensor rows = normal({6, width}, 4) * at::tensor({1e-3F, 1.0F, 50.0F, 0.0F, 7.0F, 2.0F}).view({6, 1});
    const Quantised ours(rows, 8 * width, Float8Scale::kRowAmax, 8);  // a rank with two rows fewer than the first
    for (int64_t row = 0; row < 6; ++row) {
      const Quantised alone(rows[row]);
      EXPECT_EQ(ours.scales[row].item<float>(), alone.number());
      EXPECT_TRUE(at::equal(ours.bytes().narrow(0, row * width, width), alone.bytes()));
      EXPECT_TRUE(at::equal(ours.rebuilt().narrow(0, row * width, width), alone.rebuilt()));
    }
    EXPECT_TRUE(at::equal(ours.bytes().narrow(0, 6 * width, 2 * width), at::zeros({2 * width}, at::kByte)));
  }
}

TEST(Float8Quantise, NanStaysInItsRow) {
  const at::Tensor rows = normal({3, 8}, 4);
  rows[1][2] = kInfinity;
  const at::Tensor bad = at::isnan(Quantised(rows, -1, Float8Scale::kRowAmax, 3).rebuilt()).view({3, 8});
  EXPECT_TRUE(bad[1].all().item<bool>());
  EXPECT_EQ(bad.sum().item<int64_t>(), 8);
}

/// Payloads of all ranks in one buffer, separated by other data.
struct Gathered {
  Gathered(const at::Tensor& whole, int64_t dim, int ranks, bool by_rows)
      : dim(dim), chunk_size((whole.size(dim) + ranks - 1) / ranks) {
    const int64_t numel = whole.numel() / whole.size(dim) * chunk_size;
    const int64_t row_numel = dim + 1 == whole.dim() ? chunk_size : whole.size(-1);
    const int64_t count = by_rows ? numel / row_numel : 1;
    const int64_t place = (numel + 15) / 16 * 16;
    const at::Tensor bytes = at::full({ranks, place + 4 * count + 12}, 77, at::kByte);
    payloads = bytes.narrow(1, 0, numel).view(at::kFloat8_e4m3fn);
    scales = bytes.narrow(1, place, 4 * count).view(at::kFloat);
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t begin = std::min(rank * chunk_size, whole.size(dim));
      const at::Tensor rows = whole.narrow(dim, begin, std::min(chunk_size, whole.size(dim) - begin)).contiguous();
      quantise_float8(rows, payloads[rank], scales[rank]);
      const at::Tensor numbers = payloads[rank].narrow(0, 0, rows.numel()).to(at::kFloat);
      const at::Tensor repeated = scales[rank].repeat_interleave(by_rows ? row_numel : numel);
      parts.push_back((numbers * repeated.narrow(0, 0, rows.numel())).view(rows.sizes()));
    }
  }

  int64_t dim, chunk_size;
  at::Tensor payloads, scales;
  std::vector<at::Tensor> parts;
};

void expect_rebuilt(at::IntArrayRef sizes, int64_t dim, int ranks, at::ScalarType dtype) {
  for (const bool by_rows : {false, true}) {
    const Gathered gathered(normal(sizes, 5), dim, ranks, by_rows);
    const at::Tensor whole = at::full(sizes, -1, dtype);
    dequantise_float8(gathered.payloads, gathered.scales, dim, gathered.chunk_size, whole);
    EXPECT_TRUE(at::equal(whole, at::cat(gathered.parts, dim).to(dtype)))
        << at::IntArrayRef(sizes) << " cut along " << dim << " over " << ranks << (by_rows ? " by rows" : "");
  }
}

TEST(Float8Quantise, RebuildsTheWholeOfEvenAndUnevenChunks) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    expect_rebuilt({8, 8}, 0, 4, dtype);
    expect_rebuilt({7, 5}, 0, 3, dtype);  // the last rank has one row of three
    expect_rebuilt({5, 8}, 0, 4, dtype);  // the last rank has none
    expect_rebuilt({3, 12}, 1, 2, dtype);
    expect_rebuilt({2, 32, 2}, 1, 4, dtype);
    expect_rebuilt({2, 8, 16}, 1, 4, dtype);
    expect_rebuilt({1, 1}, 0, 1, dtype);
  }
}

TEST(Float8Quantise, OnlyDimensionZeroMayBeUneven) {
  EXPECT_THAT(message_of([] {
                expect_rebuilt({2, 5}, 1, 2, at::kFloat);
              }),
              HasSubstr("only dimension 0 may be uneven"));
}

/// The kernels' threads, run sequentially, in a grid that does not divide the number of values.
TEST(Float8Quantise, TheKernelsDoAsTheirTwinsBitForBit) {
  constexpr int64_t kThreads = 7;
  const at::Tensor buffer = normal({1010}, 2);
  for (const int64_t offset : {0, 3}) {
    const at::Tensor rows = buffer.narrow(0, offset, 1001);
    const Quantised by_loops(rows, 1005);
    const at::Tensor bytes = at::full({1005}, 99, at::kByte);
    float scale = 0;
    uint32_t amax = 0;
    const Float8Quantise quantise{.rows = rows.const_data_ptr(),
                                  .format = FloatFormat::kFloat,
                                  .power_of_two = false,
                                  .vectors = offset == 0,
                                  .numel = rows.numel(),
                                  .payload = static_cast<Float8Bits*>(bytes.data_ptr()),
                                  .row_numel = bytes.numel(),
                                  .scale_count = 1,
                                  .scales = &scale,
                                  .amax = nullptr};
    for (int64_t i = 0; i < kThreads; ++i) amax = std::max(amax, amax_of_thread<float>(quantise, 0, i, kThreads));
    for (int64_t i = 0; i < kThreads; ++i) quantise_in_thread<float>(quantise, 0, amax, i, kThreads);
    EXPECT_EQ(scale, by_loops.number());
    EXPECT_TRUE(at::equal(bytes, by_loops.bytes()));

    const at::Tensor whole = at::zeros({1005}, at::kBFloat16);
    const Float8Dequantise dequantise{.payload = quantise.payload,
                                      .scales = &scale,
                                      .payload_stride = 0,
                                      .scale_stride = 0,
                                      .row_numel = 1008,
                                      .ranks = 1,
                                      .format = FloatFormat::kBFloat16,
                                      .vectors = offset == 0,
                                      .runs = 1,
                                      .chunk_run = 1008,
                                      .whole_run = 1005,
                                      .whole = whole.data_ptr()};
    for (int64_t i = 0; i < kThreads; ++i) dequantise_in_thread<BFloat16Bits>(dequantise, 0, i, kThreads);
    EXPECT_TRUE(at::equal(whole, by_loops.rebuilt().to(at::kBFloat16)));
  }
}

}  // namespace
}  // namespace megashard::testing
