#include "framework/recompute/kept_outputs.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/enum_tag.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "framework/arguments/nearest_name.h"
#include "framework/recompute/call_state.h"

namespace megashard::detail {
namespace {

// A key between autograd and the kernels for which LibTorch has no kernels.
constexpr auto kBelowAutograd = c10::DispatchKey::Fake;

thread_local KeptOutputs::Run* running = nullptr;

constexpr const char* kAttention = "aten::scaled_dot_product_attention";
constexpr const char* kAttentionKernels[] = {
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_flash_attention_for_cpu"};

struct OperatorSpelling {
  std::string name;                     // "aten::mm"
  std::optional<std::string> overload;  // unset: all
};

/// Parses "mm", "aten::mm", "aten::mm.dtype", and Python's "aten.mm", "aten.mm.default".
OperatorSpelling parse_operator(std::string text) {
  OperatorSpelling result;
  const auto colons = text.find("::");
  std::string space = "aten", rest = text;
  if (colons != std::string::npos) {
    space = text.substr(0, colons);
    rest = text.substr(colons + 2);
  } else if (text.starts_with("aten.")) {
    rest = text.substr(5);
  }
  const auto dot = rest.find('.');
  if (dot != std::string::npos) {
    const std::string overload = rest.substr(dot + 1);
    result.overload = overload == "default" ? "" : overload;
    rest.resize(dot);
  }
  result.name = space + "::" + rest;
  return result;
}

bool has_alias(const std::vector<c10::Argument>& arguments) {
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::Argument& argument) { return argument.alias_info() != nullptr; });
}

/// Reason why outputs of the operator cannot be kept; null if they can.
const char* why_not(const c10::OperatorHandle& op) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
    return "autograd never sees it: it is made of other operators; name those (a linear layer is "
           "aten::mm or aten::addmm)";
  if (op.schema().is_mutable()) return "it changes a tensor in place";
  if (has_alias(op.schema().returns())) return "it returns a view, which costs nothing to make again";
  if (op.schema().returns().empty()) return "it returns nothing";
  return nullptr;
}

void add_operators(const OperatorSpelling& wanted, const std::vector<c10::OperatorName>& all, OperatorList& found,
                   bool required) {
  const char* reason = nullptr;
  bool exists = false;
  const size_t before = found.size();
  for (const auto& each : all) {
    if (each.name != wanted.name || (wanted.overload && each.overload_name != *wanted.overload)) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(each);
    if (!op) continue;
    exists = true;
    const char* refusal = why_not(*op);
    if (refusal == nullptr) {
      found.push_back(*op);
    } else if (reason == nullptr || !op->schema().is_mutable()) {
      reason = refusal;
    }
  }
  if (!required || found.size() > before) return;
  if (!exists) {
    std::vector<std::string> known;
    for (const auto& each : all) known.push_back(each.name);
    TORCH_CHECK(false, "recompute cannot save outputs of ", wanted.name, ": there is no such operator",
                did_you_mean(wanted.name, known));
  }
  TORCH_CHECK(false, "recompute cannot save outputs of ", wanted.name, ": ", reason);
}

/// The generator that an operator uses; undefined if none.
at::Generator drawn_generator(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return {};
  at::Generator fallback;
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isGenerator() && value.toGenerator().defined()) return value.toGenerator();
    if (fallback.defined() || !value.isTensor() || !value.toTensor().defined()) continue;
    const auto device = value.toTensor().device();
    if (device.is_cpu()) fallback = at::detail::getDefaultCPUGenerator();
    if (device.is_cuda()) fallback = at::globalContext().defaultGenerator(device);
  }
  return fallback;
}

/// The same data without autograd metadata, which would keep its graph alive.
c10::IValue without_graph(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(value.toTensor().tensor_data()) : value;
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) {
    list.push_back(tensor.defined() ? tensor.tensor_data() : tensor);
  }
  return list;
}

template <class F>
void for_each_defined(const std::vector<c10::IValue>& values, const F& visit) {
  for (const auto& value : values) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (tensor.defined()) visit(tensor);
      }
    }
  }
}

void pass_run(const c10::OperatorHandle& op, torch::jit::Stack* stack);

TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&pass_run>()); }

}  // namespace

OperatorList operators_named(const std::vector<std::string>& names) {
  const auto all = c10::Dispatcher::singleton().getAllOpNames();
  OperatorList found;
  for (const auto& name : names) {
    const auto wanted = parse_operator(name);
    if (wanted.name == kAttention) {
      for (const char* kernel : kAttentionKernels)
        add_operators({.name = kernel, .overload = ""}, all, found, /*required=*/false);
    } else {
      add_operators(wanted, all, found, /*required=*/true);
    }
  }
  return found;
}

KeptOutputs::KeptOutputs(std::string region, std::shared_ptr<const OperatorList> operators, bool rng)
    : region_(std::move(region)), operators_(std::move(operators)), rng_(rng) {}

bool KeptOutputs::chosen(const c10::OperatorHandle& op) const {
  return std::find(operators_->begin(), operators_->end(), op) != operators_->end();
}

void KeptOutputs::keep(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  Entry entry{.op = op,
              .values = {},
              .versions = {},
              .generator = rng_ ? drawn_generator(op, stack) : at::Generator(),
              .generator_after = {}};
  at::Tensor before;
  if (entry.generator.defined()) before = generator_state(entry.generator);
  op.callBoxed(stack);
  if (entry.generator.defined()) {
    entry.generator_after = generator_state(entry.generator);
    if (same_generator_state(before, entry.generator_after)) entry.generator = at::Generator();
  }
  for (const auto& value : torch::jit::last(stack, op.schema().returns().size()))
    entry.values.push_back(without_graph(value));
  for_each_defined(entry.values, [&](const at::Tensor& tensor) { entry.versions.push_back(tensor._version()); });
  entries_.push_back(std::move(entry));
}

void KeptOutputs::hand_out(Run& run, const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  TORCH_CHECK(run.next_ < entries_.size(), "recompute of ", region_, ": forward kept ", entries_.size(),
              " outputs, and ", op.schema().name(),
              " asks for one more when computed again; its forward must do the same every time");
  Entry& entry = entries_[run.next_++];
  TORCH_CHECK(entry.op == op, "recompute of ", region_, ": kept output ", run.next_ - 1, " is of ",
              entry.op.schema().name(), ", and ", op.schema().name(),
              " asks for it when computed again; its forward must do the same every time");
  if (entry.given_away) return op.callBoxed(stack);  // requested twice in a backward: run it
  auto version = entry.versions.begin();
  for_each_defined(entry.values, [&](const at::Tensor& tensor) {
    TORCH_CHECK(tensor._version() == *version++, "recompute of ", region_, ": the output of ", op.schema().name(),
                " that it kept was changed in place afterwards: use the operation that makes a new tensor, or take ",
                op.schema().name(), " off the list");
  });
  if (entry.generator.defined()) set_generator_state(entry.generator, entry.generator_after);
  torch::jit::drop(stack, op.schema().arguments().size());
  for (const auto& value : entry.values) stack.push_back(without_graph(value));
  if (!run.give_away_) return;
  entry.given_away = true;
  entry.values.clear();
}

KeptOutputs::Run::Run(KeptOutputs* outputs, Kind kind) : outputs_(outputs), kind_(kind), outer_(running) {
  if (outputs_ == nullptr) return;
  if (kind_ == Kind::kAgain) {
    const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
    give_away_ = in_backward && !torch::autograd::get_current_graph_task_keep_graph();
  }
  running = this;
  watching_.emplace(kBelowAutograd);
}

KeptOutputs::Run::~Run() {
  if (outputs_ != nullptr) running = outer_;
}

void KeptOutputs::Run::finish() const {
  if (outputs_ == nullptr) return;
  TORCH_CHECK(next_ == outputs_->entries_.size(), "recompute of ", outputs_->region_, ": forward kept ",
              outputs_->entries_.size(), " outputs, and only ", next_,
              " were asked for when computed again; its forward must do the same every time");
}

bool KeptOutputs::Run::take(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  for (Run* run = this; run != nullptr; run = run->outer_) {
    if (!run->outputs_->chosen(op)) {
      if (run->kind_ == Kind::kAgain) return false;  // the enclosing run belongs to another forward
      continue;
    }
    if (run->kind_ == Kind::kFirst) {
      run->outputs_->keep(op, stack);
    } else {
      run->outputs_->hand_out(*run, op, stack);
    }
    return true;
  }
  return false;
}

namespace {

void pass_run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(kBelowAutograd);
  if (running == nullptr || !running->take(op, *stack)) op.callBoxed(stack);
}

}  // namespace

}  // namespace megashard::detail
