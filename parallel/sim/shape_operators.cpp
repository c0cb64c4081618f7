#include "parallel/sim/shape_operators.h"

#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace megashard::sim {
namespace {

using at::Tensor;
using torch::jit::Stack;
using CallArguments = std::vector<c10::IValue>;

Tensor of_sizes(c10::IntArrayRef sizes, const Tensor& like) { return at::empty(sizes, like.options()); }
Tensor of_sizes(c10::IntArrayRef sizes, const Tensor& like, at::ScalarType dtype) {
  return at::empty(sizes, like.options().dtype(dtype));
}

/// [B, heads, T, channels] with the memory layout [B, T, heads, channels], as in flash attention.
Tensor by_tokens(const Tensor& heads) { return at::empty_like(heads.transpose(1, 2)).transpose(1, 2); }

Stack attention(const CallArguments& a) {
  const Tensor& query = a[0].toTensor();
  return {by_tokens(query), of_sizes(query.sizes().slice(0, 3), query, at::kFloat)};
}
Stack attention_backward(const CallArguments& a) {
  return {by_tokens(a[1].toTensor()), by_tokens(a[2].toTensor()), by_tokens(a[3].toTensor())};
}
Stack flash(const CallArguments& a) {
  const Tensor& query = a[0].toTensor();
  std::vector<int64_t> rows = {query.size(-2), query.size(-3)};
  if (query.dim() == 4) rows.insert(rows.begin(), query.size(0));
  const auto nothing = [&] { return of_sizes({0}, query); };
  return {of_sizes(query.sizes(), query), of_sizes(rows, query, at::kFloat), nothing(), nothing(), nothing()};
}
Stack like_three(const CallArguments& a) {
  return {at::empty_like(a[1].toTensor()), at::empty_like(a[2].toTensor()), at::empty_like(a[3].toTensor())};
}
Stack index_select(const CallArguments& a) {
  const Tensor& self = a[0].toTensor();
  std::vector<int64_t> sizes = self.sizes().vec();
  const auto dim = static_cast<size_t>(at::maybe_wrap_dim(a[1].toInt(), self.dim()));
  if (!sizes.empty()) sizes[dim] = a[2].toTensor().numel();
  return {of_sizes(sizes, self)};
}
Stack embedding_backward(const CallArguments& a) {
  const Tensor& gradient = a[0].toTensor();
  return {of_sizes({a[2].toInt(), gradient.size(-1)}, gradient)};
}
Stack where(const CallArguments& a) {
  const Tensor &condition = a[0].toTensor(), &first = a[1].toTensor(), &second = a[2].toTensor();
  const auto sizes = at::infer_size(at::infer_size(condition.sizes(), first.sizes()), second.sizes());
  return {of_sizes(sizes, condition, at::result_type(first, second))};
}
Stack dropout(const CallArguments& a) {
  const Tensor& input = a[0].toTensor();
  return {at::empty_like(input), of_sizes(input.sizes(), input, at::kBool)};
}
Stack scaled_product(const CallArguments& a) {
  const Tensor &first = a[0].toTensor(), &second = a[1].toTensor();
  return {of_sizes({first.size(0), second.size(1)}, first, a[6].isNone() ? first.scalar_type() : a[6].toScalarType())};
}
Stack grouped_product(const CallArguments& a) {
  const Tensor &first = a[0].toTensor(), &second = a[1].toTensor();
  if (second.dim() == 3) return {of_sizes({first.size(0), second.size(2)}, first, first.scalar_type())};
  return {of_sizes({a[2].toTensor().size(0), first.size(0), second.size(1)}, first, first.scalar_type())};
}
Stack layer_norm(const CallArguments& a) {
  const Tensor& input = a[0].toTensor();
  std::vector<int64_t> rows = input.sizes().vec();
  std::fill(rows.end() - static_cast<std::ptrdiff_t>(a[1].toIntVector().size()), rows.end(), 1);
  return {at::empty_like(input), of_sizes(rows, input, at::kFloat), of_sizes(rows, input, at::kFloat)};
}
Stack layer_norm_backward(const CallArguments& a) {
  const auto like = [&](size_t i) { return a[i].isNone() ? Tensor() : at::empty_like(a[i].toTensor()); };
  return {at::empty_like(a[1].toTensor()), like(5), like(6)};
}
Stack count_nonzero(const CallArguments& a) {
  const Tensor& self = a[0].toTensor();
  std::vector<int64_t> sizes;
  const auto dims = a[1].toIntVector();
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    const bool counted = dims.empty() || std::ranges::any_of(dims, [&](int64_t each) {
                           return at::maybe_wrap_dim(each, self.dim()) == dim;
                         });
    if (!counted) sizes.push_back(self.size(dim));
  }
  return {of_sizes(sizes, self, at::kLong)};
}
Stack searchsorted(const CallArguments& a) {
  const Tensor& values = a[1].toTensor();
  return {of_sizes(values.sizes(), values, at::kLong)};
}
Stack like_first(const CallArguments& a) { return {at::empty_like(a[0].toTensor())}; }

/// Operators without a meta kernel, or with one that is slow or in Python.
const std::unordered_map<std::string, Stack (*)(const CallArguments&)>& shape_formulas() {
  static const std::unordered_map<std::string, Stack (*)(const CallArguments&)> all = {
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward},
      {"aten::_flash_attention_forward", flash},
      {"aten::_flash_attention_backward", like_three},
      {"aten::index_select", index_select},
      {"aten::embedding_dense_backward", embedding_backward},
      {"aten::where.self", where},
      {"aten::count_nonzero.dim_IntList", count_nonzero},
      {"aten::searchsorted.Tensor", searchsorted},
      {"aten::native_dropout", dropout},
      {"aten::native_dropout_backward", like_first},
      {"aten::native_layer_norm", layer_norm},
      {"aten::native_layer_norm_backward", layer_norm_backward},
      {"aten::_grouped_mm", grouped_product},
      {"aten::_scaled_mm", scaled_product},
      {"aten::_local_scalar_dense", [](const CallArguments&) { return Stack{c10::Scalar(1)}; }},
      {"aten::equal", [](const CallArguments&) { return Stack{true}; }},
  };
  return all;
}

std::string full_name(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

/// True if it has a meta kernel other than the fallback, which throws.
bool has_meta_kernel(const c10::OperatorHandle& op) {
  using enum c10::DispatchKey;
  const auto kernels = {Meta, CompositeExplicitAutograd, CompositeExplicitAutogradNonFunctional,
                        CompositeImplicitAutograd};
  return std::ranges::any_of(kernels, [&](c10::DispatchKey key) { return op.hasKernelForDispatchKey(key); });
}

/// True for operators that only return arguments they write to; sizes stay the same.
bool returns_what_it_writes(const c10::FunctionSchema& schema) {
  return std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && result.alias_info()->isWrite();
  });
}

/// For abs.out and similar elementwise operators: `out` gets the broadcast sizes of the inputs.
void resize_out(const c10::FunctionSchema& schema, const c10::IValue* arguments) {
  std::vector<int64_t> sizes;
  const c10::IValue* out = nullptr;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (schema.arguments()[i].is_out()) {
      out = arguments + i;
    } else if (arguments[i].isTensor() && arguments[i].toTensor().defined()) {
      sizes = at::infer_size(sizes, arguments[i].toTensor().sizes());
    }
  }
  if (out != nullptr && out->isTensor()) out->toTensor().resize_(sizes);
}

void return_what_it_writes(const c10::FunctionSchema& schema, Stack* stack) {
  const size_t base = stack->size() - schema.arguments().size();
  resize_out(schema, stack->data() + base);
  Stack results;
  for (size_t i = 0; i < schema.arguments().size() && results.size() < schema.returns().size(); ++i) {
    const auto* info = schema.arguments()[i].alias_info();
    if (info != nullptr && info->isWrite()) results.push_back((*stack)[base + i]);
  }
  torch::jit::drop(*stack, schema.arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

}  // namespace

void call_on_meta(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  if (const auto found = shape_formulas().find(full_name(op)); found != shape_formulas().end()) {
    CallArguments arguments(stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size()), stack->end());
    torch::jit::drop(*stack, schema.arguments().size());
    for (auto& result : found->second(arguments)) stack->push_back(std::move(result));
  } else if (has_meta_kernel(op)) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
  } else {
    TORCH_CHECK(returns_what_it_writes(schema), "a plan cannot go through ", full_name(op),
                ": what it returns depends on values, and a plan has none (pictures need some)");
    return_what_it_writes(schema, stack);
  }
}

Tensor meta_alias(const Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       c10::DataPtr(nullptr, c10::Device(c10::kMeta)), c10::GetAllocator(c10::kMeta),
                       /*resizable=*/true);
  const c10::InferenceMode inference(tensor.is_inference());
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::Meta),
                                                        tensor.dtype());
  auto* made = alias.unsafeGetTensorImpl();
  made->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made->set_wrapped_number(true);
  return alias;
}

int64_t bytes_of_elements(const Tensor& tensor) {
  int64_t elements = tensor.numel() == 0 ? 0 : 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) elements *= tensor.stride(i) == 0 ? 1 : tensor.size(i);
  return elements * static_cast<int64_t>(tensor.element_size());
}

}  // namespace megashard::sim
