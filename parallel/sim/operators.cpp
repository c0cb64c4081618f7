// Runs every operator of the CUDA backend as the CPU's over the same memory.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "parallel/sim/generator.h"
#include "parallel/sim/graph_capture.h"
#include "parallel/sim/operation.h"
#include "parallel/sim/operation_costs.h"
#include "parallel/sim/settings.h"
#include "parallel/sim/shape_operators.h"
#include "parallel/sim/tensor_memory.h"

namespace megashard::sim {
namespace {

/// CUDA has one kernel for a softmax from fp16 to fp32 (half_to_float); the CPU has none. The operator runs on the CPU
/// between the two calls: begin() casts its input, end() the gradient that it returns.
class CastingSoftmax {
 public:
  /// No effect on other operators and on softmaxes without a cast.
  static CastingSoftmax begin(const c10::OperatorHandle& op, torch::jit::Stack* stack);
  void end(torch::jit::Stack* stack) const;

 private:
  at::Tensor grad_input_;  // backward's output; an fp32 tensor is written instead
};

CastingSoftmax CastingSoftmax::begin(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  CastingSoftmax softmax;
  const c10::FunctionSchema& schema = op.schema();
  if (schema.overload_name() != "out") return softmax;  // LibTorch's other overloads call this one
  const auto argument = [&](size_t index) -> c10::IValue& {
    return (*stack)[stack->size() - schema.arguments().size() + index];
  };
  const std::string& name = schema.name();
  if (name == "aten::_softmax" || name == "aten::_log_softmax") {  // (self, dim, half_to_float, out)
    if (!argument(2).toBool()) return softmax;
    argument(0) = argument(0).toTensor().to(at::kFloat);
    argument(2) = false;
  } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    // (grad_output, output, dim, input_dtype, grad_input)
    const at::ScalarType input = argument(3).toScalarType(), output = argument(1).toTensor().scalar_type();
    if (input == output) return softmax;
    softmax.grad_input_ = argument(4).toTensor();
    argument(3) = output;
    argument(4) = at::empty_like(softmax.grad_input_, softmax.grad_input_.options().dtype(output));
  }
  return softmax;
}

void CastingSoftmax::end(torch::jit::Stack* stack) const {
  if (!grad_input_.defined()) return;
  grad_input_.copy_(stack->back().toTensor());
  stack->back() = grad_input_;
}

using torch::jit::Stack;

/// Operators for which the host waits on a GPU, because result sizes or a branch depend on values.
bool reads_values(const std::string& name) {
  static const std::vector<std::string> names{
      "aten::nonzero",  "aten::masked_select",      "aten::equal",    "aten::unique_dim",         "aten::_unique",
      "aten::_unique2", "aten::unique_consecutive", "aten::bincount", "aten::_local_scalar_dense"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// True if it draws random numbers but has no generator argument.
bool draws_by_default(const c10::OperatorHandle& op) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    if (optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType) return false;
  }
  return true;
}

/// `draws_from`: device whose default generator it uses, or -1.
void call_on_host(const c10::OperatorHandle& op, Stack* stack, int draws_from) {
  std::optional<DrawsFromDevice> numbers;
  if (draws_from >= 0) numbers.emplace(draws_from);
  const CastingSoftmax softmax = CastingSoftmax::begin(op, stack);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  softmax.end(stack);
}

/// One operator call on the CPU.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), base_(stack->size() - schema_.arguments().size()) {}

  void run() {
    const c10::DeviceIndex index = device_index();
    Operation operation(SimDevice::at(index), schema_.name());
    operation_ = &operation;
    device_ = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(operation.device().index));
    if (reads_values(schema_.name()) || indexes_by_mask()) waits_ = true;
    if (waits_) capture_of(operation.device()).refuse(schema_.name().c_str());
    if (shapes_) operation.computes(arithmetic_seconds(op_, *stack_));
    arguments_to_host();
    if (shapes_) return call_with_shapes();
    Stack again;
    if (operation.device().recording.on()) again = arguments_of_now();
    std::optional<at::Tensor> random_state;
    const bool draws = !generator_.defined() && draws_by_default(op_);
    if (draws) generator_ = cpu_generator_of(default_generator(device_.index()));
    if (keep() && generator_.defined()) random_state = generator_.get_state();
    call_on_host(op_, stack_, draws ? device_.index() : -1);
    for (auto& [alias, original] : written_) take_new_sizes(alias, original);
    results_to_device();
    if (keep()) record(std::move(again), std::move(random_state));
    if (waits_) operation.device().host_waits_for_stream(operation.stream(), interned(schema_.name())->c_str());
  }

 private:
  void call_with_shapes() {
    call_on_meta(op_, stack_);
    for (auto& [alias, original] : written_) take_new_sizes(alias, original);
    results_to_device();
    operation_->end();
    if (waits_) operation_->device().host_waits_for_stream(operation_->stream(), interned(schema_.name())->c_str());
  }

  bool keep() const { return operation_->device().recording.on() && touches_; }

  template <class Visit>
  void over_argument_tensors(const c10::IValue& value, const Visit& visit) const {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        if (tensor) visit(*tensor);
      }
    }
  }

  c10::DeviceIndex device_index() const {
    c10::DeviceIndex index = -1;
    for (size_t i = base_; i < stack_->size(); ++i) {
      const c10::IValue& value = (*stack_)[i];
      over_argument_tensors(value, [&](const at::Tensor& tensor) {
        if (index < 0 && tensor.defined() && tensor.is_cuda()) index = tensor.get_device();
      });
      if (index < 0 && value.isDevice() && value.toDevice().is_cuda()) index = value.toDevice().index();
    }
    return index < 0 ? static_cast<c10::DeviceIndex>(current_device()) : index;
  }

  bool indexes_by_mask() const {
    if (!takes_indices_of_the_host()) return false;
    bool mask = false;
    over_argument_tensors((*stack_)[base_ + 1], [&](const at::Tensor& tensor) {
      mask |= tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    });
    return mask;
  }

  bool takes_indices_of_the_host() const {
    const std::string& name = schema_.name();
    return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
  }

  at::Tensor to_host(const at::Tensor& tensor, const c10::AliasInfo* alias_info) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(tensor.dim() == 0 || takes_indices_of_the_host(), schema_.name(),
                  ": Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
                  tensor.device());
      return tensor;
    }
    TORCH_CHECK(tensor.get_device() == device_.index(), schema_.name(),
                ": Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
                tensor.device());
    const bool writes = alias_info != nullptr && alias_info->isWrite();
    const bool views = alias_info != nullptr && !writes;
    if (writes) {
      operation_->writes(tensor);
      if (shapes_ && reads_what_it_writes(schema_.name())) operation_->reads(tensor);
    } else if (!views) {
      operation_->reads(tensor);
    }
    if (!views) touches_ = true;
    at::Tensor alias = shapes_ ? meta_alias(tensor) : host_alias(tensor);
    storages_.emplace_back(alias.storage().unsafeGetStorageImpl(), tensor.storage());
    if (writes) written_.emplace_back(alias, tensor);
    return alias;
  }

  void arguments_to_host() {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      c10::IValue& value = (*stack_)[base_ + i];
      const c10::Argument& argument = schema_.arguments()[i];
      const c10::AliasInfo* info = argument.alias_info();
      if (value.isTensor()) {
        value = to_host(value.toTensor(), info);
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors;
        for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(to_host(tensor, info));
        value = std::move(tensors);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
          tensors.push_back(tensor ? std::optional(to_host(*tensor, info)) : tensor);
        value = std::move(tensors);
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        value = c10::Device(shapes_ ? c10::kMeta : c10::kCPU);
      } else if (value.isGenerator() && value.toGenerator().defined()) {
        generator_ = cpu_generator_of(value.toGenerator());
        value = generator_;
      } else if (value.isNone() && is_generator(argument)) {
        generator_ = cpu_generator_of(default_generator(device_.index()));
        value = generator_;
      }
    }
  }

  /// Arguments for a later replay. Values that it reads on the host are copied now.
  Stack arguments_of_now() const {
    Stack now(stack_->begin() + static_cast<std::ptrdiff_t>(base_), stack_->end());
    for (c10::IValue& value : now) {
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const at::Tensor tensor = value.toTensor();
      const bool of_device = std::any_of(storages_.begin(), storages_.end(), [&](const auto& each) {
        return each.first == tensor.storage().unsafeGetStorageImpl();
      });
      if (of_device || !tensor.is_cpu()) continue;
      const at::Tensor copy = tensor.clone();
      // A cloned number would count as a tensor, which changes the compute dtype.
      copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      value = copy;
    }
    return now;
  }

  static bool is_generator(const c10::Argument& argument) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  /// Handles an out= tensor that the operator resized, or an operator that changes a tensor's view.
  void take_new_sizes(const at::Tensor& alias, const at::Tensor& original) {
    auto* impl = original.unsafeGetTensorImpl();
    if (alias.sizes() == original.sizes() && alias.strides() == original.strides() &&
        alias.storage_offset() == original.storage_offset())
      return;
    if (shapes_) return take_shape(alias, original);
    const void* before = Arena::get().reachable(original.storage().data());
    if (alias.storage().data() != before && alias.storage().nbytes() > 0) {
      const size_t bytes = alias.storage().nbytes();
      const c10::Storage grown = new_device_storage(bytes, device_);
      std::memcpy(Arena::get().mirror(grown.data()), alias.storage().data(), bytes);
      impl->set_storage_keep_dtype(grown);
      moved_.emplace_back(alias, Arena::get().mirror(grown.data()));
    }
    impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    operation_->writes(original);
  }

  void take_shape(const at::Tensor& alias, const at::Tensor& original) {
    auto* impl = original.unsafeGetTensorImpl();
    if (const size_t bytes = alias.storage().nbytes(); bytes > original.storage().nbytes())
      impl->set_storage_keep_dtype(new_device_storage(bytes, device_));
    impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    operation_->writes(original);
  }

  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined() || result.device().type() != (shapes_ ? c10::kMeta : c10::kCPU)) return result;
    for (const auto& [alias, original] : written_) {
      if (alias.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return original;
    }
    const auto* storage = result.storage().unsafeGetStorageImpl();
    for (const auto& [alias, original] : storages_) {
      if (alias == storage) return device_tensor(original, result);
    }
    const size_t bytes = result.storage().nbytes();
    const c10::Storage made = new_device_storage(bytes, device_);
    storages_.emplace_back(result.storage().unsafeGetStorageImpl(), made);
    host_results_.push_back(result);  // keeps its storage's address unique
    if (bytes > 0 && !shapes_) {
      char* mirror = Arena::get().mirror(made.data());
      std::memcpy(mirror, result.storage().data(), bytes);
      made_.emplace_back(mirror, bytes);
      touches_ = true;
    }
    const at::Tensor tensor = device_tensor(made, result);
    operation_->writes(tensor);
    return tensor;
  }

  void results_to_device() {
    const size_t first = stack_->size() - schema_.returns().size();
    for (size_t i = first; i < stack_->size(); ++i) {
      c10::IValue& value = (*stack_)[i];
      if (value.isTensor()) {
        value = to_device(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors;
        for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(to_device(tensor));
        value = std::move(tensors);
      }
    }
  }

  /// Records the call for replays; its new results go to the same memory as the first time.
  void record(Stack arguments, std::optional<at::Tensor> random_state) {
    if (capture_of(operation_->device()).running()) random_state.reset();  // each replay draws new numbers
    operation_->recorded([op = op_, arguments = std::move(arguments), made = made_, moved = moved_,
                          device = device_.index(), generator = generator_,
                          random_state = std::move(random_state)]() mutable {
      Stack stack = arguments;
      std::optional<at::Tensor> state_now;
      if (random_state) {
        state_now = generator.get_state();
        generator.set_state(*random_state);
      }
      call_on_host(op, &stack, draws_by_default(op) ? device : -1);
      if (state_now) generator.set_state(*state_now);
      for (const auto& [alias, target] : moved) std::memcpy(target, alias.storage().data(), alias.storage().nbytes());
      std::vector<const c10::StorageImpl*> known;
      for (const c10::IValue& argument : arguments) collect_storages(argument, known);
      size_t next = 0;
      const auto put = [&](const at::Tensor& result) {
        if (!result.defined() || !result.is_cpu()) return;
        const auto* storage = result.storage().unsafeGetStorageImpl();
        if (std::find(known.begin(), known.end(), storage) != known.end()) return;
        known.push_back(storage);
        if (storage->nbytes() == 0) return;
        TORCH_CHECK(next < made.size() && made[next].second == storage->nbytes(), op.schema().name(),
                    " makes a result of another size");
        std::memcpy(made[next].first, storage->data(), made[next].second);
        ++next;
      };
      for (const c10::IValue& value : stack) {
        if (value.isTensor()) put(value.toTensor());
        if (value.isTensorList()) {
          for (const at::Tensor& tensor : value.toTensorVector()) put(tensor);
        }
      }
    });
  }

  static void collect_storages(const c10::IValue& value, std::vector<const c10::StorageImpl*>& storages) {
    const auto add = [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.has_storage()) storages.push_back(tensor.storage().unsafeGetStorageImpl());
    };
    if (value.isTensor()) add(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t base_;
  Operation* operation_ = nullptr;
  c10::Device device_{c10::kCUDA};
  at::Generator generator_;
  const bool shapes_ = settings().shapes;
  bool touches_ = false, waits_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;                  // alias, original
  std::vector<std::pair<const c10::StorageImpl*, c10::Storage>> storages_;  // storages of aliases and results
  std::vector<at::Tensor> host_results_;
  std::vector<std::pair<char*, size_t>> made_;
  std::vector<std::pair<at::Tensor, char*>> moved_;  // out= tensors that outgrew their memory, and their new address
};

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { Call(op, stack).run(); }

}  // namespace
}  // namespace megashard::sim

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&megashard::sim::run_on_host>());
}

// CUDA has kernels for these, as the CPU has; for other devices LibTorch has formulas, which precede a fallback.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name : {"native_layer_norm", "native_group_norm", "mish_backward", "_grouped_mm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&megashard::sim::run_on_host>());
}
