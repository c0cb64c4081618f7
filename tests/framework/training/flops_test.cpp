#include "framework/training/flops.h"

#include <gtest/gtest.h>

namespace megashard {
namespace {

// Two matrix products a weight in forward, four in backward; attention scores and values besides.
TEST(TrainingFlops, CountMatrixProducts) {
  constexpr double kLayers = 2, kHidden = 8, kFfn = 32, kHeads = 4, kGroups = 2, kHead = 2, kVocab = 100;
  constexpr double kTokens = 3 * 16, kSequence = 16;
  const TransformerShape shape{.num_layers = 2,
                               .hidden_size = 8,
                               .ffn_hidden_size = 32,
                               .gated_mlp = false,
                               .num_heads = 4,
                               .num_key_value_heads = 2,
                               .head_size = 2,
                               .vocab_size = 100};
  const double attention_weights = kHidden * kHead * (2 * kHeads + 2 * kGroups);
  const double scores = 2 * kSequence * kHeads * kHead / 2;  // two products, of which the causal half counts
  const double expected =
      6 * kTokens * (kLayers * (attention_weights + scores + 2 * kHidden * kFfn) + kHidden * kVocab);
  EXPECT_DOUBLE_EQ(training_flops(shape, 3, 16), expected);
  auto gated = shape;
  gated.gated_mlp = true;
  EXPECT_DOUBLE_EQ(training_flops(gated, 3, 16), expected + 6 * kTokens * kLayers * kHidden * kFfn);
}

TEST(TflopsPerDevice, DividesByTimeAndRanks) { EXPECT_DOUBLE_EQ(tflops_per_device(8e12, 2.0, 4), 1.0); }

TEST(GpuPeakTflops, KnowsCommonGpus) {
  EXPECT_EQ(gpu_peak_tflops("NVIDIA H200", at::kBFloat16), 989.4);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA H100 PCIe", at::kBFloat16), 756.0);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA A100-SXM4-80GB", at::kFloat), 19.5);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA H20", at::kBFloat16), 148.0);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA GH200 480GB", at::kFloat), 66.9);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA GeForce RTX 4090", at::kBFloat16), 165.2);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA GeForce RTX 4090 Laptop GPU", at::kBFloat16), std::nullopt);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA RTX A4000", at::kBFloat16), std::nullopt);  // is no A40
  EXPECT_EQ(gpu_peak_tflops("NVIDIA A10G", at::kBFloat16), std::nullopt);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA H200", at::kDouble), std::nullopt);
  EXPECT_EQ(gpu_peak_tflops("a GPU of the future", at::kBFloat16), std::nullopt);
}

TEST(MeasuredCpuTflops, IsAPlausibleRate) {
  const double tflops = measured_cpu_tflops(at::kFloat);
  EXPECT_GT(tflops, 1e-4);
  EXPECT_LT(tflops, 100.0);
}

}  // namespace
}  // namespace megashard
