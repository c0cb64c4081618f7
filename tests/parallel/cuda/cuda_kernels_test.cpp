// The kernels on a GPU against their CPU twins.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "parallel/copies/batched_copy.h"
#include "parallel/copies/float8_quantise.h"
#include "parallel/device/cuda_module.h"
#include "parallel/updates/adamw.h"
#include "parallel/updates/squares.h"
#include "tests/parallel/copies/copy_cases.h"
#include "tests/parallel/updates/adamw_cases.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

#ifdef MEGASHARD_TEST_CUDA

at::Tensor normal(at::IntArrayRef sizes, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator);
}

class CudaKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    MEGASHARD_NOT_ON_SIM("its kernels are the CPU's");
    if (load_cuda_module().device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
  }
  const c10::Device gpu_{c10::kCUDA, 0};
};

TEST_F(CudaKernels, CopiesAsTheTwinBitForBit) {
  const auto cases = copy_cases();
  CopyBuffers on_host(cases), on_device(cases, gpu_);
  copy_batch(on_host.copies(), c10::kCPU);
  copy_batch(on_device.copies(), gpu_);
  for (size_t i = 0; i < cases.size(); ++i) ASSERT_EQ(on_device.to_bytes(i), on_host.to_bytes(i)) << cases[i];
}

void expect_same_quantised(const at::Tensor& rows, int64_t places, Float8Scale kind, c10::Device device) {
  const int64_t count = kind == Float8Scale::kRowAmax && rows.numel() > 0 ? places / rows.size(-1) : 1;
  std::vector<at::Tensor> bytes, scales, wholes;
  for (const c10::Device where : {c10::Device(c10::kCPU), device}) {
    bytes.push_back(at::full({places}, 99, at::TensorOptions(where).dtype(at::kByte)));
    scales.push_back(at::zeros({count}, where));
    const at::Tensor payload = bytes.back().view(at::kFloat8_e4m3fn);
    quantise_float8(rows.to(where), payload, scales.back(), kind);
    wholes.push_back(at::empty({places}, at::TensorOptions(where).dtype(at::kBFloat16)));
    dequantise_float8(payload.view({1, -1}), scales.back().view({1, -1}), 0, places, wholes.back());
  }
  EXPECT_TRUE(at::equal(bytes[0], bytes[1].cpu())) << rows.scalar_type() << rows.sizes();
  EXPECT_TRUE(at::equal(scales[0].view(at::kInt), scales[1].cpu().view(at::kInt)));
  EXPECT_TRUE(at::equal(wholes[0].view(at::kShort), wholes[1].cpu().view(at::kShort)));
}

TEST_F(CudaKernels, QuantiseAsTheTwinBitForBit) {
  for (const auto kind : {Float8Scale::kAmax, Float8Scale::kPowerOfTwo, Float8Scale::kRowAmax}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      expect_same_quantised((normal({513, 77}, 1) * 9).to(dtype), 515 * 77, kind, gpu_);
      expect_same_quantised((normal({4096, 1024}, 2) * 9).to(dtype), 4096 * 1024, kind, gpu_);
      expect_same_quantised(at::zeros({5}, dtype), 5, kind, gpu_);
      expect_same_quantised(at::zeros({0, 3}, dtype), 16, kind, gpu_);
    }
    expect_same_quantised(at::full({3}, 1e-45), 3, kind, gpu_);
  }
}

void expect_same_whole(at::IntArrayRef sizes, int64_t dim, int ranks, c10::Device device) {
  const int64_t chunk_size = (sizes[dim] + ranks - 1) / ranks;
  const int64_t chunk_numel = c10::multiply_integers(sizes) / sizes[dim] * chunk_size;
  const at::Tensor payloads = normal({ranks, chunk_numel}, 3).to(at::kFloat8_e4m3fn);
  const at::Tensor scales = normal({ranks, 1}, 4);
  const at::Tensor on_host = at::zeros(sizes), on_device = at::zeros(sizes, device);
  dequantise_float8(payloads, scales, dim, chunk_size, on_host);
  dequantise_float8(payloads.to(device), scales.to(device), dim, chunk_size, on_device);
  EXPECT_TRUE(at::equal(on_host, on_device.cpu())) << sizes << " cut along " << dim;
}

TEST_F(CudaKernels, RebuildTheWholeAsTheTwin) {
  expect_same_whole({1000, 64}, 0, 8, gpu_);
  expect_same_whole({7, 5}, 0, 3, gpu_);
  expect_same_whole({5, 8}, 0, 4, gpu_);
  expect_same_whole({3, 12}, 1, 2, gpu_);
  expect_same_whole({2, 32, 8}, 1, 4, gpu_);
}

TEST_F(CudaKernels, AdamWAsTheTwinBitForBit) {
  const at::Tensor factor = at::full({}, 0.37, at::kDouble), factor_there = factor.to(gpu_);
  for (const auto& dtypes : adamw_dtypes()) {
    AdamWShards on_host(dtypes, c10::kCPU), on_device(dtypes, gpu_);
    AdamWNumbers numbers{
        .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .factor = nullptr, .skip = nullptr};
    for (auto* shards : {&on_host, &on_device}) {
      const bool is_host = shards == &on_host;
      numbers.factor = (is_host ? factor : factor_there).const_data_ptr<double>();
      auto pieces = shards->pieces();
      adamw_step(pieces, numbers, is_host ? c10::Device(c10::kCPU) : gpu_);
    }
    const auto one = on_host.written(), other = on_device.written();
    for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(same_numbers(one[i], other[i])) << dtypes.gradient << i;
  }
}

TEST_F(CudaKernels, SumsSquares) {
  std::vector<at::Tensor> many;
  double expected = 0;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const int64_t numel : {1, 77, 100'003}) {
      const at::Tensor values = normal({numel}, 6).to(dtype);
      expected += values.to(at::kDouble).square().sum().item<double>();
      many.push_back(values.to(gpu_));
    }
  }
  EXPECT_NEAR(sum_of_squares(many).item<double>(), expected, 1e-14 * expected);  // another order of sums
}

#endif

}  // namespace
}  // namespace megashard::testing
