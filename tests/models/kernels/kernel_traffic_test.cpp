// Compares traffic_of() with the counted loads and stores of the kernels, and with the figures of docs/kernels.md.

#include <gtest/gtest.h>

#include <concepts>
#include <vector>

#include "models/kernels/gpu/cross_entropy_grad_rows.h"
#include "models/kernels/gpu/head_norm_grad_rows.h"
#include "models/kernels/gpu/head_norm_rows.h"
#include "models/kernels/gpu/rms_norm_grad_rows.h"
#include "models/kernels/gpu/rotary_threads.h"
#include "models/kernels/gpu/swiglu_threads.h"
#include "parallel/copies/float8_rows.h"

namespace megashard::gpu {

/// bf16 that counts the kernels' loads and stores.
struct CountedBits {
  uint16_t bits;
};
int64_t counted_bytes = 0;

constexpr float to_float(CountedBits value) { return megashard::to_float(BFloat16Bits{value.bits}); }
constexpr void round_to(CountedBits& to, float value) {
  BFloat16Bits narrow{};
  megashard::round_to(narrow, value);
  to.bits = narrow.bits;
}
template <std::same_as<CountedBits> T, int kVector>
Vector<T, kVector> load(const T* from) {
  counted_bytes += kVector * 2;
  return *static_cast<const Vector<T, kVector>*>(static_cast<const void*>(from));
}
template <std::same_as<CountedBits> T, int kVector>
void store(T* to, const Vector<T, kVector>& values) {
  counted_bytes += kVector * 2;
  *static_cast<Vector<T, kVector>*>(static_cast<void*>(to)) = values;
}

namespace {

constexpr FloatFormat kFormat = FloatFormat::kBFloat16;  // the launches' format; their numbers are CountedBits

/// Memory aligned to 16 bytes.
struct Numbers {
  explicit Numbers(int64_t numel) : vectors(static_cast<size_t>(numel + 7) / 8) {}
  void* data() { return vectors.data(); }
  std::vector<Vector<CountedBits, 8>> vectors;
};

template <class Threads>
int64_t bytes_of_rows(const typename Threads::Launch& launch) {
  counted_bytes = 0;
  for (int64_t row = 0; row < Threads::rows(launch); ++row) {
    for (int lane = 0; lane < Threads::kGroup; ++lane) {
      typename Threads::Registers mine{};
      Threads::before(launch, row, lane, mine);
      Threads::after(launch, row, lane, mine);
    }
  }
  return counted_bytes;
}

template <class Run>
int64_t bytes_of_threads(int threads, const Run& run) {
  counted_bytes = 0;
  for (int thread = 0; thread < threads; ++thread) run(thread);
  return counted_bytes;
}

TEST(KernelTraffic, IsWhatTheThreadsLoadAndStore) {
  constexpr int64_t kRows = 3, kWidth = 30000;  // does not fit in registers
  Numbers x(kRows * kWidth), y(kRows * kWidth), grad(kRows * kWidth), other(kRows * kWidth), weight(kWidth);
  std::vector<float> floats(2 * kRows);
  const std::vector<int64_t> labels{5, -100, -1};

  const RmsNormRows of_norm{.x = x.data(),
                            .branch = grad.data(),
                            .sum = other.data(),
                            .weight = weight.data(),
                            .y = y.data(),
                            .inverse_rms = floats.data(),
                            .rows = kRows,
                            .width = kWidth,
                            .eps = 1,
                            .format = kFormat,
                            .vectors = true};
  EXPECT_EQ((bytes_of_rows<RmsNormThreads<CountedBits, 8, kLongestNormGroup>>(of_norm)),
            traffic_of(of_norm).moved - 4 * kRows);
  const RmsNormGradRows of_norm_grad{.grad_y = grad.data(),
                                     .x = x.data(),
                                     .weight = weight.data(),
                                     .inverse_rms = floats.data(),
                                     .grad_sum = other.data(),
                                     .grad_x = y.data(),
                                     .partial = nullptr,
                                     .grad_weight = nullptr,
                                     .rows = kRows,
                                     .width = kWidth,
                                     .groups = 1,
                                     .format = kFormat,
                                     .vectors = true};
  EXPECT_EQ((bytes_of_rows<RmsNormGradThreads<CountedBits, 8, kLongestNormGroup>>(of_norm_grad)),
            traffic_of(of_norm_grad).moved - 4 * kRows);

  const HeadShape heads{.tokens = 4,
                        .length = 2,
                        .stride_batch = 6 * 96,
                        .stride_time = 3 * 96,
                        .stride_head = 96,
                        .heads = 3,
                        .head_dim = 96,
                        .half = 32,
                        .table_per_batch = false,
                        .zero_centered = false,
                        .format = kFormat,
                        .vectors = true};
  std::vector<float> of_heads(12);
  const HeadNormRows of_head_norm{x.data(), weight.data(),   grad.data(), other.data(),
                                  y.data(), of_heads.data(), 1,           heads};
  EXPECT_EQ((bytes_of_rows<HeadNormThreads<CountedBits, 8, kHeadGroup>>(of_head_norm)),
            traffic_of(of_head_norm).moved - 4 * 12);
  const HeadNormGradRows of_head_grad{grad.data(), x.data(), weight.data(), other.data(), other.data(), of_heads.data(),
                                      y.data(),    nullptr,  nullptr,       1,            heads};
  EXPECT_EQ((bytes_of_rows<HeadNormGradThreads<CountedBits, 8, kHeadGroup>>(of_head_grad)),
            traffic_of(of_head_grad).moved - 4 * 12);

  const SwigluElements swiglu{x.data(), grad.data(), y.data(), {1, 1003, 1003}, kFormat, true};
  EXPECT_EQ(bytes_of_threads(7, [&](int thread) { swiglu_in_thread<CountedBits>(swiglu, thread, 7); }),
            traffic_of(swiglu).moved);
  for (void* const product : {static_cast<void*>(nullptr), static_cast<void*>(grad.data())}) {
    const SwigluGradElements swiglu_grad{grad.data(), x.data(),      weight.data(), y.data(), other.data(),
                                         product,     {5, 200, 400}, kFormat,       true};
    EXPECT_EQ(bytes_of_threads(7, [&](int thread) { swiglu_in_thread<CountedBits>(swiglu_grad, thread, 7); }),
              traffic_of(swiglu_grad).moved);
  }

  const RotaryTokens rotary{.x = x.data(),
                            .cos = grad.data(),
                            .sin = other.data(),
                            .y = y.data(),
                            .batch = 1,
                            .length = 2,
                            .of_x = {0, 3 * 64, 64},
                            .of_y = {0, 5 * 64, 64},
                            .heads = 3,
                            .head_dim = 64,
                            .half = 16,
                            .table_per_batch = false,
                            .back = false,
                            .format = kFormat,
                            .vectors = true};
  EXPECT_EQ(bytes_of_threads(64,
                             [&](int thread) {
                               for (int token = 0; token < 2; ++token)
                                 rotate_token<CountedBits, 8>(rotary, token, thread, 64);
                             }),
            traffic_of(rotary).moved);

  const CrossEntropyRows entropy{x.data(), labels.data(), floats.data(), floats.data(), kRows, 4097, kFormat};
  EXPECT_EQ(bytes_of_rows<CrossEntropyThreads<CountedBits>>(entropy),
            traffic_of(entropy).moved - kRows * (20 + 2));  // labels and fp32; the label's logit is not read by load()
  const CrossEntropyGradRows entropy_grad{x.data(), labels.data(), floats.data(), floats.data(),
                                          kRows,    20000,         -100,          kFormat};
  using GradThreads = CrossEntropyGradThreads<CountedBits>;
  EXPECT_EQ(bytes_of_threads(GradThreads::kThreads,
                             [&](int thread) {
                               for (int64_t block = 0; block < kRows * entropy_grad.tiles_per_row(); ++block)
                                 GradThreads::run(entropy_grad, block, thread);
                             }),
            traffic_of(entropy_grad).moved - kRows * 20);
}

/// Figures in MB, as in the table of docs/kernels.md.
void expect_megabytes(const Traffic& traffic, double moved, double first, double least) {
  EXPECT_NEAR(static_cast<double>(traffic.moved) / 1e6, moved, 0.05);
  EXPECT_NEAR(static_cast<double>(traffic.moved - traffic.again) / 1e6, first, 0.05);
  EXPECT_NEAR(static_cast<double>(traffic.least) / 1e6, least, 0.05);
}

RmsNormRows norm(int64_t rows, int64_t width) {
  RmsNormRows launch{};
  launch.rows = rows;
  launch.width = width;
  launch.format = kFormat;
  launch.vectors = true;
  return launch;
}
RmsNormGradRows norm_grad(int64_t rows, int64_t width, float* partial) {
  RmsNormGradRows launch{};
  launch.partial = launch.grad_weight = partial;
  launch.rows = rows;
  launch.width = width;
  launch.groups = norm_grad_groups(rows, width, kFormat, true);
  launch.format = kFormat;
  launch.vectors = true;
  return launch;
}

/// A sequence of 8,192 tokens of Llama 3 8B; 2^26 elements copied from fp32 to bf16, or from bf16 to fp8.
TEST(KernelTraffic, OfTheTableOfTheDocumentation) {
  constexpr int64_t kTokens = 8192, kMany = int64_t{1} << 26;
  float any = 0;
  expect_megabytes(traffic_of(norm(kTokens, 4096)), 201.4, 134.3, 134.3);
  expect_megabytes(traffic_of(norm_grad(kTokens, 4096, &any)), 348.6, 214.4, 201.4);
  expect_megabytes(traffic_of(norm(32 * kTokens, 128)), 202.4, 135.3, 135.3);
  expect_megabytes(traffic_of(norm_grad(32 * kTokens, 128, &any)), 339.8, 205.6, 202.4);
  RmsNormRows added = norm(kTokens, 4096);
  added.branch = &any;
  added.sum = &any;
  expect_megabytes(traffic_of(added), 335.6, 268.5, 268.5);
  RmsNormGradRows added_grad = norm_grad(kTokens, 4096, &any);
  added_grad.grad_sum = &any;
  expect_megabytes(traffic_of(added_grad), 415.7, 281.5, 268.5);
  expect_megabytes(traffic_of(norm(kTokens, 16384)), 805.3, 536.9, 536.9);
  expect_megabytes(traffic_of(norm_grad(kTokens, 16384, &any)), 1359.6, 822.7, 805.4);

  SwigluElements swiglu{};
  SwigluGradElements swiglu_grad{};
  swiglu.shape = swiglu_grad.shape = {kTokens, 14336, 2 * 14336};
  swiglu.format = swiglu_grad.format = kFormat;
  expect_megabytes(traffic_of(swiglu), 704.6, 704.6, 704.6);
  expect_megabytes(traffic_of(swiglu_grad), 1174.4, 1174.4, 1174.4);
  swiglu_grad.y = &any;
  expect_megabytes(traffic_of(swiglu_grad), 1409.3, 1409.3, 1409.3);

  RotaryTokens rotary{};
  rotary.batch = 1;
  rotary.length = kTokens;
  rotary.heads = 32;
  rotary.head_dim = 128;
  rotary.half = 64;
  rotary.format = kFormat;
  expect_megabytes(traffic_of(rotary), 201.3, 136.3, 136.3);

  HeadNormRows head_norm{};
  HeadNormGradRows head_grad{};
  auto& heads = head_norm.shape;
  heads.tokens = heads.length = kTokens;
  heads.heads = 32;
  heads.head_dim = 128;
  heads.half = 64;
  heads.format = kFormat;
  heads.vectors = true;
  head_grad.shape = heads;
  head_grad.partial = &any;
  head_grad.groups = head_grad_groups(heads);
  expect_megabytes(traffic_of(head_norm), 269.5, 137.4, 137.4);
  expect_megabytes(traffic_of(head_grad), 412.4, 213.1, 204.5);

  CrossEntropyRows entropy{};
  CrossEntropyGradRows entropy_grad{};
  entropy.rows = entropy_grad.rows = kTokens;
  entropy.width = entropy_grad.width = 128256;
  entropy.format = entropy_grad.format = kFormat;
  expect_megabytes(traffic_of(entropy), 2101.5, 2101.5, 2101.5);
  expect_megabytes(traffic_of(entropy_grad), 4202.9, 4202.9, 4202.9);

  CopyTable copy{};
  copy.count = 1;
  copy.tiles = 8192;
  copy.pieces[0].row_numel = copy.pieces[0].numel = kMany;
  copy.pieces[0].tiles_per_row = 8192;
  copy.pieces[0].from_format = FloatFormat::kFloat;
  copy.pieces[0].to_format = kFormat;
  copy.pieces[0].converts = true;
  expect_megabytes(traffic_of(copy), 402.7, 402.7, 402.7);
  Float8Quantise quantise{};
  quantise.format = kFormat;
  quantise.numel = quantise.row_numel = kMany;
  quantise.scale_count = 1;
  expect_megabytes(traffic_of(quantise), 335.5, 201.3, 201.3);
  quantise.row_numel = 4096;
  quantise.scale_count = kMany / 4096;
  expect_megabytes(traffic_of(quantise), 335.6, 201.4, 201.4);
  Float8Dequantise dequantise{};
  dequantise.ranks = 8;
  dequantise.format = kFormat;
  dequantise.runs = 1;
  dequantise.chunk_run = kMany / 8;
  dequantise.whole_run = kMany;
  dequantise.row_numel = kMany / 8;
  expect_megabytes(traffic_of(dequantise), 201.3, 201.3, 201.3);
  dequantise.row_numel = 4096;
  expect_megabytes(traffic_of(dequantise), 201.4, 201.4, 201.4);
}

}  // namespace
}  // namespace megashard::gpu
