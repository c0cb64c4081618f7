// The fused head norm and rotary embedding: on CPUs, in the host form of the GPU's threads, on the simulated device
// and, if there is one, on a GPU.

#include "models/kernels/head_kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>

#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/gpu/head_norm_grad_rows.h"
#include "models/kernels/gpu/head_norm_rows.h"
#include "models/kernels/gpu_operators.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using at::Tensor;

constexpr double kEps = 1e-5;

struct Heads {
  int64_t head_dim, half;
  bool table_per_batch = false, zero_centered = false;
};
// Groups of 8 threads and warps; vectors and single elements; channels without rotation; the widest heads.
const std::vector<Heads> kHeads = {{8, 4},
                                   {8, 3, true},
                                   {17, 1},
                                   {64, 32},
                                   {96, 16, true},
                                   {128, 64},
                                   {250, 125},
                                   {256, 128, true},
                                   {256, 8},
                                   {64, 32, true, true},
                                   {128, 64, false, true}};

struct Inputs {
  Tensor x, weight, cos, sin, grad_y;

  /// x is a strided view (its tensor has one more head) and starts `shift` elements after an address aligned for
  /// vectors.
  Inputs(const Heads& heads, at::ScalarType dtype, int64_t shift = 0) {
    auto generator = at::detail::createCPUGenerator(9);
    const auto normal = [&](at::IntArrayRef sizes) { return at::randn(sizes, generator, at::TensorOptions(at::kCPU)); };
    const auto placed = [&](const Tensor& values) {
      const Tensor memory = at::empty({values.numel() + shift}, at::TensorOptions(at::kCPU).dtype(dtype));
      return memory.narrow(0, shift, values.numel()).view(values.sizes()).copy_(values);
    };
    x = placed(2 * normal({2, 5, 4, heads.head_dim})).narrow(2, 0, 3);
    weight = placed(normal({heads.head_dim}) * 0.3 + (heads.zero_centered ? 0 : 1));
    const Tensor angles = heads.table_per_batch ? normal({2, 5, heads.half}) : normal({5, heads.half});
    cos = placed((3 * angles).cos());
    sin = placed((3 * angles).sin());
    grad_y = placed(normal({2, 5, 3, heads.head_dim}));
  }
  std::vector<Tensor> on(c10::Device device) const {
    std::vector<Tensor> all;
    for (const Tensor& each : {x, weight, cos, sin, grad_y}) all.push_back(each.to(device));
    return all;
  }
};

/// y, grad_x and grad_weight by autograd of `function`, with leaves of `dtype`.
template <class Function>
std::vector<Tensor> differentiated(const Inputs& in, at::ScalarType dtype, c10::Device device,
                                   const Function& function) {
  const Tensor x = in.x.to(device, dtype).detach().requires_grad_();
  const Tensor weight = in.weight.to(device, dtype).detach().requires_grad_();
  const Tensor y = function(x, weight, in.cos.to(device, dtype), in.sin.to(device, dtype));
  y.backward(in.grad_y.to(device, dtype));
  std::vector<Tensor> results;
  for (const Tensor& each : {y.detach(), x.grad(), weight.grad()}) results.push_back(each.cpu());
  return results;
}

auto fused(const Heads& heads) {
  return [=](const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin) {
    return norm_and_rotate(x, {.weight = weight, .eps = kEps, .zero_centered = heads.zero_centered}, cos, sin);
  };
}

/// The formula in the dtype of its arguments (fp64).
auto formula(const Heads& heads) {
  return [=](const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin) {
    const Tensor factor = heads.zero_centered ? weight + 1 : weight;
    const Tensor normed = x * (x.square().mean({-1}, true) + kEps).rsqrt() * factor;
    const Tensor c = cos.unsqueeze(-2), s = sin.unsqueeze(-2);
    const Tensor first = normed.narrow(3, 0, heads.half), second = normed.narrow(3, heads.half, heads.half);
    const Tensor rest = normed.narrow(3, 2 * heads.half, heads.head_dim - 2 * heads.half);
    return at::cat({first * c - second * s, second * c + first * s, rest}, 3);
  };
}

/// The separate operations, as models/layers/norm.cpp and attention.cpp compute them.
auto apart(const Heads& heads) {
  return [=](const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin) {
    if (!heads.zero_centered) return rotate(rms_norm(x, weight, kEps), cos, sin);
    const Tensor normed = rms_norm(x.to(at::kFloat), weight.to(at::kFloat) + 1, kEps);
    return rotate(normed.to(x.scalar_type()), cos, sin);
  };
}

/// Tolerance: two roundings to the dtype (fp32: sums in any order), relative to the largest value.
void expect_close(const Tensor& got, const Tensor& want, at::ScalarType dtype, const std::string& what) {
  const double unit = dtype == at::kFloat ? 4e-6 : dtype == at::kBFloat16 ? 0x1p-6 : 0x1p-9;
  const Tensor difference = (got.to(at::kDouble) - want.to(at::kDouble)).abs();
  EXPECT_LE(difference.max().item<double>(), unit * want.abs().max().item<double>()) << what;
}

std::string text_of(const Heads& heads, at::ScalarType dtype) {
  return c10::str(dtype, " ", heads.head_dim, " of which 2 * ", heads.half, heads.zero_centered ? " centred" : "");
}

TEST(NormAndRotate, IsTheFormulaInFp64) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const Heads& heads : kHeads) {
      const Inputs in(heads, dtype);
      const auto got = differentiated(in, dtype, device_of_tests(), fused(heads));
      const auto want = differentiated(in, at::kDouble, c10::kCPU, formula(heads));
      for (size_t i = 0; i < got.size(); ++i) expect_close(got[i], want[i], dtype, text_of(heads, dtype));
    }
  }
}

TEST(NormAndRotate, HasTheBitsOfOneAfterTheOther) {
  MEGASHARD_NOT_ON_SIM("its groups of threads add up in another order");
  if (cpu_takes_row_kernels_of_gpu()) GTEST_SKIP() << "likewise in their host form";
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const Heads& heads : kHeads) {
      const Inputs in(heads, dtype);
      const auto got = differentiated(in, dtype, c10::kCPU, fused(heads));
      const auto want = differentiated(in, dtype, c10::kCPU, apart(heads));
      // If a head ends within a vector, the compiler fuses other products and sums. This shows in fp32.
      const bool same = dtype != at::kFloat || heads.head_dim % 16 == 0;
      for (size_t i = 0; i < got.size(); ++i) {
        if (same) {
          EXPECT_TRUE(got[i].equal(want[i])) << text_of(heads, dtype) << " " << i;
        } else {
          expect_close(got[i], want[i], dtype, text_of(heads, dtype));
        }
      }
    }
  }
}

TEST(NormAndRotate, WiderHeadsAreComputedApart) {
  const Heads heads{258, 129};
  const Inputs in(heads, at::kFloat);
  const auto got = differentiated(in, at::kFloat, device_of_tests(), fused(heads));
  const auto want = differentiated(in, at::kFloat, device_of_tests(), apart(heads));
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(want[i]));
}

void check_threads(c10::Device device) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t shift : {0, 1}) {
      for (const Heads& heads : kHeads) {
        const Inputs in(heads, dtype, shift);
        const auto all = in.on(device);
        const auto [y, rms] = gpu::norm_and_rotate(all[0], all[1], all[2], all[3], kEps, heads.zero_centered);
        const auto [grad_x, grad_weight] =
            gpu::norm_and_rotate_backward(all[4], all[0], all[1], all[2], all[3], rms, heads.zero_centered, true);
        const auto [no_weight, none] =
            gpu::norm_and_rotate_backward(all[4], all[0], all[1], all[2], all[3], rms, heads.zero_centered, false);
        EXPECT_FALSE(none.defined());
        EXPECT_TRUE(no_weight.equal(grad_x));
        const auto want = differentiated(in, at::kDouble, c10::kCPU, formula(heads));
        const auto what = text_of(heads, dtype);
        expect_close(y.cpu(), want[0], dtype, what);
        expect_close(grad_x.cpu(), want[1], dtype, what);
        expect_close(grad_weight.cpu(), want[2], dtype, what);
      }
    }
  }
}

TEST(NormAndRotate, TheGpusThreads) { check_threads(device_of_tests()); }

TEST(NormAndRotate, NotANumberStaysInItsHead) {
  Inputs in({64, 32}, at::kFloat);
  in.x[1][2][0][5] = std::numeric_limits<float>::quiet_NaN();
  const auto all = in.on(device_of_tests());
  for (const bool threads : {false, true}) {
    const auto [y, rms] = threads ? gpu::norm_and_rotate(all[0], all[1], all[2], all[3], kEps, false)
                                  : fused_operators().norm_and_rotate(all[0], all[1], all[2], all[3], kEps, false);
    EXPECT_EQ(y.isnan().sum().item<int64_t>(), 64);
    EXPECT_TRUE(y[1][2][0].isnan().all().item<bool>());
  }
}

#ifdef MEGASHARD_TEST_CUDA
TEST(CudaHeadKernels, NormAndRotate) {
  MEGASHARD_NOT_ON_SIM("its kernels are the CPU's");
  if (load_cuda_module().device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
  check_threads(c10::Device(c10::kCUDA, 0));
}
#endif

}  // namespace
}  // namespace megashard::testing
