// Compares the row kernels of GPUs with the formulas in fp64 and with the CPU's kernels: in their host form, on the
// simulated device with their declared accesses, and on a GPU if there is one (CudaRowKernels).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "models/kernels/fused_operators.h"
#include "models/kernels/cross_entropy.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/gpu/cross_entropy_grad_rows.h"
#include "models/kernels/gpu/rms_norm_grad_rows.h"
#include "models/kernels/gpu/rotary_threads.h"
#include "models/kernels/gpu/swiglu_threads.h"
#include "models/kernels/gpu_operators.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using at::Tensor;

constexpr double kEps = 1e-5;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Tensor normal(at::IntArrayRef sizes, at::ScalarType dtype) {
  static auto generator = at::detail::createCPUGenerator(7);
  return at::randn(sizes, generator, at::TensorOptions(at::kCPU)).to(dtype);
}
Tensor labels_below(int64_t width, int64_t rows) {
  static auto generator = at::detail::createCPUGenerator(8);
  return at::randint(0, width, {rows}, generator, at::TensorOptions(at::kCPU).dtype(at::kLong));
}

/// A dense copy on `device`, `shift` elements after an address that is aligned for vectors.
Tensor placed(const Tensor& x, c10::Device device, int64_t shift) {
  const Tensor memory = at::empty({x.numel() + shift}, x.options().device(device));
  return memory.narrow(0, shift, x.numel()).view(x.sizes()).copy_(x);
}

/// Tolerance: one rounding to the dtype, two if a result is also rounded before its last product; fp32: sums in any
/// order.
double roundings(at::ScalarType dtype) {
  if (dtype == at::kFloat) return 2e-6;
  return dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-10;
}

/// Tolerance for comparisons with a CPU's norms: without AVX2 each of its 4 lanes adds a quarter of a row in sequence.
double beside_cpu(at::ScalarType dtype) { return std::max(roundings(dtype), 1e-5); }

/// Expects NaN and infinities at the same places, and other values within `bar` times the largest value. If values are
/// differences of larger terms, `terms` is their size. fp16 near zero may differ by its smallest number.
void expect_close(const Tensor& on_device, const Tensor& wanted, double bar, const std::string& what,
                  double terms = 0) {
  const Tensor got = on_device.cpu().to(at::kDouble), want = wanted.to(at::kDouble);
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  const Tensor finite = want.isfinite();
  EXPECT_TRUE(at::equal(got.isnan(), want.isnan())) << what;
  EXPECT_TRUE(at::equal(got == kInfinity, want == kInfinity) && at::equal(got == -kInfinity, want == -kInfinity))
      << what;
  const Tensor numbers = want.masked_fill(~finite, 0);
  const double largest = std::max(numbers.abs().max().item<double>(), terms);
  const double smallest = on_device.scalar_type() == at::kHalf ? 0x1p-24 : 0;
  EXPECT_LE((got.masked_fill(~finite, 0) - numbers).abs().max().item<double>(), bar * largest + smallest) << what;
}

struct Place {
  c10::Device device;
  at::ScalarType dtype;
  int64_t shift;
  std::string text() const { return c10::str(dtype, " on ", device, " shifted by ", shift); }
};

/// Calls `body` for each dtype, aligned to 16 bytes and not aligned.
template <class Body>
void in_each_place(c10::Device device, const Body& body) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t shift : {0, 1}) body(Place{device, dtype, shift});
  }
}

/// Expects the fused sum and norm, and their gradients, to have the bits of the separate ones. `other` has x's sizes.
void check_added(const Tensor& x, const Tensor& other, const Tensor& weight, const std::string& what) {
  const auto [sum, y, inverse_rms] = gpu::add_rms_norm(x, other, weight, kEps);
  const auto [y_alone, inverse_alone] = gpu::rms_norm(sum, weight, kEps);
  expect_close(sum, (x + other).cpu(), 0, what);
  expect_close(y, y_alone.cpu(), 0, what);
  expect_close(inverse_rms, inverse_alone.cpu(), 0, what);
  const auto [gradient, of_weight] = gpu::rms_norm_backward(x, sum, weight, inverse_rms, true, other);
  const auto [alone, of_weight_alone] = gpu::rms_norm_backward(x, sum, weight, inverse_rms, true, {});
  expect_close(gradient, (alone + other).cpu(), 0, what);
  expect_close(of_weight, of_weight_alone.cpu(), 0, what);
}

/// Compares with the CPU's kernels and, if inputs are finite, with fp64.
void check_rms_norm(const Place& place, const Tensor& x, const Tensor& weight, const Tensor& grad_y, bool finite) {
  const auto what = c10::str("rms_norm ", x.sizes(), " ", place.text());
  const double bar = roundings(place.dtype);
  const auto on = [&](const Tensor& tensor) { return placed(tensor, place.device, place.shift); };
  const auto [y, inverse_rms] = gpu::rms_norm(on(x), on(weight), kEps);
  const auto [grad_x, grad_weight] = gpu::rms_norm_backward(on(grad_y), on(x), on(weight), inverse_rms, true, {});
  const auto [no_weight, none] = gpu::rms_norm_backward(on(grad_y), on(x), on(weight), inverse_rms, false, {});
  EXPECT_FALSE(none.defined());
  expect_close(no_weight, grad_x.cpu(), 0, what);

  const auto [cpu_y, cpu_inverse] = fused_operators().rms_norm(x, weight, kEps);
  const auto [cpu_grad_x, cpu_grad_weight] =
      fused_operators().rms_norm_backward(grad_y, x, weight, cpu_inverse, true, {});
  expect_close(y, cpu_y, beside_cpu(place.dtype), what);
  expect_close(inverse_rms, cpu_inverse, 1e-5, what);
  const double terms = finite ? (grad_y * weight).abs().max().item<double>() * cpu_inverse.max().item<double>() : 0;
  expect_close(grad_x, cpu_grad_x, beside_cpu(place.dtype), what, terms);
  expect_close(grad_weight, cpu_grad_weight, beside_cpu(place.dtype),
               what);  // sums of rounded values, some of which may be rounded differently
  check_added(on(x), on(grad_y), on(weight), what);
  if (!finite) return;
  const Tensor wide = x.to(at::kDouble), factor = weight.to(at::kDouble), gradient = grad_y.to(at::kDouble);
  const Tensor scale = (wide.square().mean({-1}, true) + kEps).rsqrt(), normed = wide * scale;
  expect_close(inverse_rms, scale.view({-1}), 2e-6, what);
  expect_close(y, normed * factor, 2 * bar, what);
  const Tensor along = normed * (gradient * factor * normed).mean({-1}, true);
  expect_close(grad_x, scale * (gradient * factor - along), bar, what, terms);
  const Tensor of_weight = gradient * normed;
  expect_close(grad_weight, of_weight.sum(0), bar, what, of_weight.abs().sum(0).max().item<double>());
}

void check_rms_norm(c10::Device device) {
  in_each_place(device, [](const Place& place) {
    // Covers warps and blocks, vectors and single elements, rows that do not fit in registers, 1 to 5 and 50 groups.
    for (const auto& [rows, width] :
         {std::pair{1, 1}, {5, 3}, {17, 17}, {17, 64}, {9, 1024}, {5, 1536}, {9, 4097}, {9, 16384}, {200, 24}}) {
      check_rms_norm(place, 3 * normal({rows, width}, place.dtype), normal({width}, place.dtype),
                     normal({rows, width}, place.dtype), true);
    }
    const Tensor x = normal({5, 40}, place.dtype), grad_y = normal({5, 40}, place.dtype);
    x[0][3] = kNan;
    x[1][3] = kInfinity;
    grad_y[2][39] = kNan;
    check_rms_norm(place, x, normal({40}, place.dtype), grad_y, false);
    const Tensor none = at::empty({0, 8}, at::TensorOptions(device_of_tests()).dtype(place.dtype)).to(place.device);
    const Tensor weight = placed(normal({8}, place.dtype), place.device, 0);
    const auto [y, inverse_rms] = gpu::rms_norm(none, weight, kEps);
    const auto [grad_x, grad_weight] = gpu::rms_norm_backward(none, none, weight, inverse_rms, true, {});
    EXPECT_EQ(grad_weight.abs().sum().item<float>(), 0);
  });
}

/// Inputs may be columns of one tensor; results equal those of dense inputs.
void check_swiglu_of_columns(const Place& place, int64_t width) {
  const auto what = c10::str("swiglu of columns ", width, " ", place.text());
  const Tensor both = placed(normal({2, 3, 2 * width}, place.dtype), place.device, place.shift);
  const Tensor grad_y = placed(normal({2, 3, width}, place.dtype), place.device, place.shift);
  const auto parts = both.split(width, -1);
  const Tensor gate = parts[0].contiguous(), up = parts[1].contiguous();
  EXPECT_TRUE(at::equal(gpu::swiglu(parts[0], parts[1]).cpu(), gpu::swiglu(gate, up).cpu())) << what;
  const auto [of_gate, of_up] = gpu::swiglu_backward(grad_y, parts[0], parts[1]);
  const auto [dense_of_gate, dense_of_up] = gpu::swiglu_backward(grad_y, gate, up);
  EXPECT_TRUE(at::equal(of_gate.cpu(), dense_of_gate.cpu()) && at::equal(of_up.cpu(), dense_of_up.cpu())) << what;
  EXPECT_EQ(of_gate.strides(), parts[0].strides()) << what;
  EXPECT_EQ(of_up.storage_offset() - of_gate.storage_offset(), width) << what << ": not side by side";
}

void check_swiglu(const Place& place, const Tensor& gate, const Tensor& up, const Tensor& grad_y, bool finite) {
  const auto what = c10::str("swiglu ", gate.sizes(), " ", place.text());
  const double bar = roundings(place.dtype);
  const auto on = [&](const Tensor& tensor) { return placed(tensor, place.device, place.shift); };
  const Tensor y = gpu::swiglu(on(gate), on(up));
  const auto [grad_gate, grad_up] = gpu::swiglu_backward(on(grad_y), on(gate), on(up));
  expect_close(y, fused_operators().swiglu(gate, up), bar, what);
  const auto [cpu_grad_gate, cpu_grad_up] = fused_operators().swiglu_backward(grad_y, gate, up);
  expect_close(grad_gate, cpu_grad_gate, bar, what);
  expect_close(grad_up, cpu_grad_up, bar, what);
  Tensor product = on(grad_y);  // y then replaces it in place
  const auto [again_grad_gate, again_grad_up] = gpu::swiglu_backward_(product, on(gate), on(up));
  expect_close(product, y.cpu(), 0, what);
  expect_close(again_grad_gate, grad_gate.cpu(), 0, what);
  expect_close(again_grad_up, grad_up.cpu(), 0, what);
  if (!finite) return;
  const Tensor g = gate.to(at::kDouble), u = up.to(at::kDouble), dy = grad_y.to(at::kDouble), s = at::sigmoid(g);
  expect_close(y, at::silu(g) * u, 2 * bar, what);
  expect_close(grad_gate, dy * u * s * (1 + g * (1 - s)), bar, what);
  expect_close(grad_up, dy * at::silu(g), 2 * bar, what);
}

void check_swiglu(c10::Device device) {
  in_each_place(device, [](const Place& place) {
    for (const int64_t numel : {1, 3, 17, 4097, 8192}) {
      check_swiglu(place, 20 * normal({numel}, place.dtype), normal({numel}, place.dtype),  // exp saturates
                   normal({numel}, place.dtype), true);
    }
    for (const int64_t width : {1, 24, 64}) check_swiglu_of_columns(place, width);
    const Tensor gate = normal({64}, place.dtype), up = normal({64}, place.dtype), grad_y = normal({64}, place.dtype);
    gate[0] = kNan;
    gate[9] = kInfinity;
    gate[18] = -kInfinity;
    up[20] = kNan;
    grad_y[22] = -kInfinity;
    check_swiglu(place, gate, up, grad_y, false);
  });
}

struct RotaryCase {
  int64_t head_dim, half;
  bool table_per_batch;
};

void check_rotation(const Place& place, const RotaryCase& shape) {
  const auto what = c10::str("rotate ", shape.head_dim, " of which 2 * ", shape.half, " ", place.text());
  const int64_t batch = 2, length = 5, heads = 3;
  const Tensor angles = 3 * normal({batch, length, shape.half}, at::kFloat);
  const Tensor tables = shape.table_per_batch ? angles : angles[0];
  const Tensor cos = tables.cos().to(place.dtype), sin = tables.sin().to(place.dtype);
  const Tensor wide = normal({batch, heads + 1, length, shape.head_dim}, place.dtype);  // one head does not belong to x
  const auto heads_of = [&](const Tensor& memory) { return memory.narrow(1, 0, heads).transpose(1, 2); };
  const auto on = [&](const Tensor& tensor) { return placed(tensor, place.device, place.shift); };
  for (const bool back : {false, true}) {
    const Tensor y = gpu::rotate(heads_of(on(wide)), on(cos), on(sin), back);
    Tensor in_place = heads_of(on(wide));
    gpu::rotate_to(in_place, on(cos), on(sin), back, in_place);
    expect_close(in_place, y.cpu(), 0, what);
    expect_close(y, fused_operators().rotate(heads_of(wide), cos, sin, back), roundings(place.dtype), what);
    const Tensor x = heads_of(wide).to(at::kDouble);
    const Tensor c = cos.to(at::kDouble).unsqueeze(-2), s = (back ? -1 : 1) * sin.to(at::kDouble).unsqueeze(-2);
    const Tensor first = x.narrow(3, 0, shape.half), second = x.narrow(3, shape.half, shape.half);
    const Tensor rest = x.narrow(3, 2 * shape.half, shape.head_dim - 2 * shape.half);
    expect_close(y, at::cat({first * c - second * s, second * c + first * s, rest}, 3), roundings(place.dtype), what);
  }
}

void check_rotation(c10::Device device) {
  in_each_place(device, [](const Place& place) {
    for (const auto& shape : {RotaryCase{8, 3, false}, {64, 32, false}, {64, 32, true}, {128, 16, true}, {17, 1, true}})
      check_rotation(place, shape);
  });
}

void check_cross_entropy(const Place& place, const Tensor& logits, const Tensor& labels, bool finite) {
  const auto what = c10::str("cross_entropy ", logits.sizes(), " ", place.text());
  const int64_t rows = logits.size(0);
  const Tensor grad_loss = normal({rows}, at::kFloat);
  const auto on = [&](const Tensor& tensor) { return placed(tensor, place.device, place.shift); };
  Tensor gradient = on(logits), cpu_gradient = logits.clone();
  const auto [loss, stats] = gpu::cross_entropy(gradient, on(labels));
  const auto [cpu_loss, cpu_stats] = fused_operators().cross_entropy(logits, labels);
  expect_close(loss, cpu_loss, 2e-6, what);
  expect_close(stats, cpu_stats, 2e-6, what);
  gpu::cross_entropy_backward_(gradient, on(labels), stats, on(grad_loss));
  fused_operators().cross_entropy_backward_(cpu_gradient, labels, cpu_stats, grad_loss);
  expect_close(gradient, cpu_gradient, std::max(roundings(place.dtype), 1e-5),
               what);  // rounding of exp(x - statistics)
  if (!finite) return;
  const Tensor all = at::log_softmax(logits.to(at::kDouble), 1), counted = labels.ge(0);
  const Tensor at_label = all.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1);
  expect_close(loss, -at_label * counted, 2e-6, what);
  const Tensor hot = at::one_hot(labels.clamp_min(0), logits.size(1)) * counted.unsqueeze(1);
  const Tensor scale = grad_loss.to(at::kDouble) * labels.ne(kIgnoredLabel);
  expect_close(gradient, (all.exp() - hot) * scale.unsqueeze(1), std::max(roundings(place.dtype), 1e-5), what);
}

void check_cross_entropy(c10::Device device) {
  in_each_place(device, [](const Place& place) {
    for (const auto& [rows, width] : {std::pair{2, 1}, {5, 3}, {5, 17}, {5, 4097}, {2, 4096}, {2, 150001}}) {
      const Tensor labels = labels_below(width, rows);
      if (rows > 2) {
        labels[1] = kIgnoredLabel;
        labels[2] = -1;  // in the vocabulary part of another rank
      }
      check_cross_entropy(place, 10 * normal({rows, width}, place.dtype), labels, true);
    }
    const Tensor logits = normal({6, 2000}, place.dtype);
    logits[0][3] = kNan;
    logits[1][3] = kInfinity;
    logits[2][3] = -kInfinity;
    logits[3].fill_(-kInfinity);
    logits[4].narrow(0, 0, 1999).fill_(-kInfinity);
    logits[4][1999] = -200;
    check_cross_entropy(place, logits, labels_below(2000, 6), false);
  });
}

TEST(GpuKernels, RmsNorm) { check_rms_norm(device_of_tests()); }
TEST(GpuKernels, Swiglu) { check_swiglu(device_of_tests()); }
TEST(GpuKernels, Rotation) { check_rotation(device_of_tests()); }
TEST(GpuKernels, CrossEntropy) { check_cross_entropy(device_of_tests()); }

TEST(GpuKernels, ALabelPastTheRowIsAnError) {
  MEGASHARD_NOT_ON_SIM("the same message through its stream");
  EXPECT_THROW(gpu::cross_entropy(normal({1, 5}, at::kFloat), at::full({1}, 5, at::kLong)), c10::Error);
}

// Another stream writes each array that a kernel reads, without an event in between: each access must be reported.
TEST(GpuKernels, TheSimulatedDeviceKnowsWhatTheyReadAndWrite) {
  MEGASHARD_SIM_ONLY();
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::Device device(c10::kCUDA, 0);
  const c10::Stream side = guard.getStreamFromGlobalPool(device);
  const auto expect_ordered = [&](const char* kernel, std::vector<Tensor> arrays, const auto& launch) {
    for (const Tensor& array : arrays) {
      const c10::Stream before = guard.exchangeStream(side);
      array.fill_(array.is_floating_point() ? 0.5 : 1);
      guard.exchangeStream(before);
      launch();
      guard.synchronizeDevice(0);
      const auto findings = simulated_cuda().take_findings();
      EXPECT_TRUE(
          std::any_of(findings.begin(), findings.end(),
                      [&](const std::string& finding) { return finding.find(std::string("race: ") + kernel) == 0; }))
          << kernel << " " << &array - arrays.data();
    }
  };
  const auto made = [&](at::IntArrayRef sizes) { return normal(sizes, at::kFloat).to(device); };
  const Tensor x = made({4, 40}), other = made({4, 40}), third = made({4, 40}), weight = made({40}), rms = made({4});
  expect_ordered("rms_norm_kernel", {x, other, weight}, [&] { gpu::add_rms_norm(x, other, weight, kEps); });
  expect_ordered("rms_norm_grad_kernel", {x, other, third, weight, rms},
                 [&] { gpu::rms_norm_backward(x, other, weight, rms, true, third); });
  expect_ordered("swiglu_kernel", {x, other}, [&] { gpu::swiglu(x, other); });
  expect_ordered("swiglu_grad_kernel", {x, other, third}, [&] { gpu::swiglu_backward(x, other, third); });
  Tensor product = made({4, 40});
  expect_ordered("swiglu_grad_kernel", {product}, [&] { gpu::swiglu_backward_(product, other, third); });
  const Tensor heads = made({2, 2, 3, 8}), cos = made({3, 4}), sin = made({3, 4});
  expect_ordered("rotate_kernel", {heads, cos, sin}, [&] { gpu::rotate(heads.transpose(1, 2), cos, sin, false); });
  Tensor turned = made({2, 3, 2, 8});
  expect_ordered("rotate_kernel", {turned}, [&] { gpu::rotate_to(heads.transpose(1, 2), cos, sin, false, turned); });
  const Tensor of_head = made({8}), rms_of_heads = made({12}), dense = made({2, 3, 2, 8});
  expect_ordered("head_norm_kernel", {heads, of_head, cos, sin},
                 [&] { gpu::norm_and_rotate(heads.transpose(1, 2), of_head, cos, sin, kEps, false); });
  expect_ordered("head_norm_grad_kernel", {dense, heads, of_head, cos, sin, rms_of_heads}, [&] {
    gpu::norm_and_rotate_backward(dense, heads.transpose(1, 2), of_head, cos, sin, rms_of_heads, false, true);
  });
  Tensor logits = made({4, 40});
  const Tensor labels = labels_below(40, 4).to(device), stats = made({4, 2}), grad_loss = made({4});
  expect_ordered("cross_entropy_kernel", {logits, labels}, [&] { gpu::cross_entropy(logits, labels); });
  expect_ordered("cross_entropy_grad_kernel", {logits, labels, stats, grad_loss},
                 [&] { gpu::cross_entropy_backward_(logits, labels, stats, grad_loss); });
}

#ifdef MEGASHARD_TEST_CUDA
class CudaRowKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    MEGASHARD_NOT_ON_SIM("GpuKernels are its tests");
    if (load_cuda_module().device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
  }
  const c10::Device gpu_{c10::kCUDA, 0};
};

TEST_F(CudaRowKernels, RmsNorm) { check_rms_norm(gpu_); }
TEST_F(CudaRowKernels, Swiglu) { check_swiglu(gpu_); }
TEST_F(CudaRowKernels, Rotation) { check_rotation(gpu_); }
TEST_F(CudaRowKernels, CrossEntropy) { check_cross_entropy(gpu_); }

// Sums, products, divisions and roots follow IEEE in the same order; only exp is a different function there.
TEST_F(CudaRowKernels, HaveTheBitsOfTheirHostForm) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t width : {17, 64, 1536, 4097, 16384}) {
      const Tensor x = normal({33, width}, dtype), weight = normal({width}, dtype), grad_y = normal({33, width}, dtype);
      const auto [y, inverse] = gpu::rms_norm(x, weight, kEps);
      const auto [on_gpu, inverse_on_gpu] = gpu::rms_norm(x.to(gpu_), weight.to(gpu_), kEps);
      EXPECT_TRUE(at::equal(y, on_gpu.cpu()) && at::equal(inverse, inverse_on_gpu.cpu())) << dtype << " " << width;
      const auto [grad_x, grad_weight] = gpu::rms_norm_backward(grad_y, x, weight, inverse, true, {});
      const auto [grad_x_on_gpu, grad_weight_on_gpu] =
          gpu::rms_norm_backward(grad_y.to(gpu_), x.to(gpu_), weight.to(gpu_), inverse.to(gpu_), true, {});
      EXPECT_TRUE(at::equal(grad_x, grad_x_on_gpu.cpu())) << dtype << " " << width;
      EXPECT_TRUE(at::equal(grad_weight, grad_weight_on_gpu.cpu())) << dtype << " " << width;
    }
    const Tensor x = normal({2, 5, 3, 64}, dtype), cos = normal({5, 32}, dtype), sin = normal({5, 32}, dtype);
    EXPECT_TRUE(
        at::equal(gpu::rotate(x, cos, sin, false), gpu::rotate(x.to(gpu_), cos.to(gpu_), sin.to(gpu_), false).cpu()));
  }
}
#endif

}  // namespace
}  // namespace megashard::testing
