#include "framework/training/flops.h"

#include <gtest/gtest.h>

namespace megashard {
namespace {

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
