#include "framework/training/optimizers/newton_schulz.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <numeric>
#include <optional>

#include "framework/matrix_product.h"

namespace megashard {
namespace {

constexpr double kEpsilon = 1e-7;  // of the norm that a matrix is divided by

using Coefficients = std::array<double, 3>;

const std::vector<Coefficients>& coefficients_of(MuonCoefficients type) {
  static const std::vector<Coefficients> simple = {{3.4445, -4.7750, 2.0315}};
  static const std::vector<Coefficients> quintic = {{4.0848, -6.8946, 2.9270},
                                                    {3.9505, -6.3029, 2.6377},
                                                    {3.7418, -5.5913, 2.3037},
                                                    {2.8769, -3.1427, 1.2046},
                                                    {2.8366, -3.0525, 1.2012}};
  return type == MuonCoefficients::kSimple ? simple : quintic;
}

double scale_of(const at::Tensor& matrix, MuonScaleMode mode) {
  const auto out = static_cast<double>(matrix.size(0)), in = static_cast<double>(matrix.size(1));
  switch (mode) {
    case MuonScaleMode::kSpectral:
      return std::sqrt(std::max(out, in));
    case MuonScaleMode::kShapeScaling:
      return std::sqrt(std::max(1.0, out / in));
    case MuonScaleMode::kUnitRmsNorm:
      return std::sqrt(out / in);
  }
  TORCH_INTERNAL_ASSERT(false, "a scale mode without a scale");
}

/// Whether cuBLAS may round the factors of fp32 products, while one lives. It is a setting of the process, which ranks
/// that are threads share: the first one sets it and the last one sets it back.
class AllowTf32 {
 public:
  explicit AllowTf32(bool allow) {
    const std::lock_guard lock(mutex_);
    if (users_++ > 0) return;
    before_ = at::globalContext().allowTF32CuBLAS();
    at::globalContext().setAllowTF32CuBLAS(allow);
  }
  ~AllowTf32() {
    const std::lock_guard lock(mutex_);
    if (--users_ == 0) at::globalContext().setAllowTF32CuBLAS(before_);
  }
  AllowTf32(const AllowTf32&) = delete;
  AllowTf32& operator=(const AllowTf32&) = delete;

 private:
  inline static std::mutex mutex_;
  inline static int users_ = 0;
  inline static bool before_ = false;
};

}  // namespace

at::Tensor orthogonalized(const at::Tensor& matrix, const NewtonSchulzOptions& options) {
  std::optional<AllowTf32> precision;
  if (!matrix.is_cpu()) precision.emplace(options.tf32);
  const bool transposed = matrix.size(0) > matrix.size(1);
  at::Tensor x = transposed ? matrix.t() : matrix;
  x = x / x.norm().clamp_min(kEpsilon);
  const auto& sets = coefficients_of(options.coefficients);
  for (int64_t step = 0; step < options.num_ns_steps; ++step) {
    const auto& [a, b, c] = sets[static_cast<size_t>(step) % sets.size()];
    const at::Tensor gram = matrix_product(x, x.t());
    x = matrix_product(x, a, matrix_product(gram, b, gram, gram, c), x, 1);
  }
  x.mul_(scale_of(matrix, options.scale_mode) * options.extra_scale_factor);
  return transposed ? x.t() : x;
}

at::Tensor orthogonalized(const at::Tensor& matrix, const std::vector<int64_t>& split_shapes,
                          const NewtonSchulzOptions& options) {
  if (split_shapes.empty()) return orthogonalized(matrix, options);
  const int64_t group = std::accumulate(split_shapes.begin(), split_shapes.end(), int64_t{0}), width = matrix.size(1);
  TORCH_CHECK(group > 0 && matrix.size(0) % group == 0, "a matrix of ", matrix.size(0),
              " rows cannot be split into groups of ", group, " rows");
  std::vector<at::Tensor> parts;
  for (const auto& part : matrix.view({-1, group, width}).split_with_sizes(split_shapes, 1))
    parts.push_back(orthogonalized(part.reshape({-1, width}), options).reshape(part.sizes()));
  return at::cat(parts, 1).view(matrix.sizes());
}

}  // namespace megashard
