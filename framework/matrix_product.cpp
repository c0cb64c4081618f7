#include "framework/matrix_product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include "framework/dispatched_operator.h"
#include "framework/packed_product.h"
#include "parallel/device/signals_held.h"

namespace at::native {
/// result = beta result + alpha mat1 mat2, with oneDNN. LibTorch exports it without a header. Weak: null if a LibTorch
/// lacks it.
__attribute__((weak)) void mkldnn_matmul(const Tensor& mat1, const Tensor& mat2, const Tensor& result, float beta,
                                         float alpha);
}  // namespace at::native

namespace megashard {
namespace {

/// For fewer multiplications, looking up a oneDNN kernel takes longer than MKL's product or our own.
constexpr int64_t kFewestProducts = 1'000'000;

void onednn_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result, double beta, double alpha) {
  const SignalsHeld held;
  at::native::mkldnn_matmul(a, b, result, static_cast<float>(beta), static_cast<float>(alpha));
}

/// False if ONEDNN_MAX_CPU_ISA disables it.
bool onednn_multiplies() {
  try {
    const at::Tensor one = at::ones({1, 1}, at::kFloat);
    onednn_product(one, one, at::empty({1, 1}, at::kFloat), 0, 1);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

bool cpu_has_slow_mkl() {
#if defined(__x86_64__)
  static const bool slow = at::native::mkldnn_matmul != nullptr && __builtin_cpu_is("intel") == 0 &&
                           __builtin_cpu_supports("avx512f") != 0 && onednn_multiplies();
  return slow;
#else
  return false;
#endif
}

using Product = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, double);

/// An operator, so that the simulated device tracks its reads and writes.
const DispatchedOperator<Product>& product_operator() {
  static const DispatchedOperator<Product> product("megashard::matrix_product");
  return product;
}

at::Tensor product_on_cpu(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& c, double beta,
                          double alpha) {
  const at::Tensor result = at::empty({a.size(0), b.size(1)}, a.options());
  if (!c && takes_packed_product(a, b)) {
    packed_product_into(result, a, b);
    return result;
  }
  if (c) result.copy_(*c);
  onednn_product(a, b, result, beta, alpha);
  return result;
}

const DispatchedOperator<void(at::Tensor&, const at::Tensor&, const at::Tensor&)>& adding_operator() {
  static const DispatchedOperator<void(at::Tensor&, const at::Tensor&, const at::Tensor&)> adding(
      "megashard::add_matrix_product_");
  return adding;
}

void add_product_on_cpu(at::Tensor& c, const at::Tensor& a, const at::Tensor& b) {
  onednn_product(a, b, c, /*beta=*/1, /*alpha=*/1);
}

bool are_own_matrices(const at::Tensor& a, const at::Tensor& b) {
  return has_own_products(a) && a.dim() == 2 && b.dim() == 2 && a.scalar_type() == b.scalar_type() &&
         a.device() == b.device();
}

bool onednn_takes(const at::Tensor& a, const at::Tensor& b) {
  return are_own_matrices(a, b) && a.size(0) * a.size(1) * b.size(1) >= kFewestProducts;
}

}  // namespace

bool has_own_products(const at::Tensor& x) {
  return cpu_has_slow_mkl() && x.scalar_type() == at::kFloat && product_operator().runs_on(x);
}

at::Tensor matrix_product(const at::Tensor& a, const at::Tensor& b) {
  const bool own = are_own_matrices(a, b) && (takes_packed_product(a, b) || onednn_takes(a, b));
  return own ? product_operator()(a, b, std::nullopt, 0, 1) : at::mm(a, b);
}

at::Tensor matrix_product(const at::Tensor& c, double beta, const at::Tensor& a, const at::Tensor& b, double alpha) {
  return onednn_takes(a, b) ? product_operator()(a, b, c, beta, alpha) : at::addmm(c, a, b, beta, alpha);
}

void matrix_product_into(at::Tensor& result, const at::Tensor& a, const at::Tensor& b) {
  if (result.is_cpu() && are_own_matrices(a, b) && takes_packed_product(a, b)) {
    packed_product_into(result, a, b);
  } else if (result.is_cpu() && onednn_takes(a, b)) {
    onednn_product(a, b, result, /*beta=*/0, /*alpha=*/1);
  } else {
    at::mm_out(result, a, b);
  }
}

void add_matrix_product_(at::Tensor& c, const at::Tensor& a, const at::Tensor& b) {
  if (onednn_takes(a, b) && c.is_contiguous()) return adding_operator()(c, a, b);
  c.addmm_(a, b);
}

TORCH_LIBRARY_FRAGMENT(megashard, library) {
  library.def("matrix_product(Tensor a, Tensor b, Tensor? c, float beta, float alpha) -> Tensor");
  library.def("add_matrix_product_(Tensor(a!) c, Tensor a, Tensor b) -> ()");
}
TORCH_LIBRARY_IMPL(megashard, CPU, library) {
  library.impl("matrix_product", &product_on_cpu);
  library.impl("add_matrix_product_", &add_product_on_cpu);
}
TORCH_LIBRARY_IMPL(megashard, Autograd, library) {
  library.impl("matrix_product", torch::CppFunction::makeFallthrough());
  library.impl("add_matrix_product_", torch::CppFunction::makeFallthrough());
}

}  // namespace megashard
