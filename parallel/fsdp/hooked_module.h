#pragma once

#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "parallel/fsdp/tensor_visitor.h"

namespace megashard {

/// Tensors of a call's arguments or results, in visiting order; hooks may replace the pointees.
using TensorRefs = c10::ArrayRef<at::Tensor*>;

/// Hooks around a module's forward (fully_shard installs them). They get the tensors, not the user's types.
class ForwardHooks {
 public:
  virtual ~ForwardHooks() = default;
  virtual void pre_forward(TensorRefs inputs) = 0;
  virtual void post_forward(TensorRefs outputs) = 0;
  virtual void forward_failed() noexcept = 0;  ///< forward threw; post_forward is not called
  /// Called before Module::to changes dtype or device of the module's parameters.
  virtual void before_conversion() = 0;
  /// Called before clone, save and load of the module; may throw.
  virtual void before_rebind(const char* operation) = 0;
};

/// Runs a module's forward inside its ForwardHooks (recompute installs one).
class ForwardRunner {
 public:
  virtual ~ForwardRunner() = default;
  /// Runs forward on the given input tensors and returns the output tensors. May be called again in backward.
  using Body = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
  /// Returns the outputs of one call. Their autograd graph may differ from the one that `body` built.
  virtual std::vector<at::Tensor> run(const Body& body, const std::vector<at::Tensor>& inputs) = 0;
};

/// Hooks around forward, which torch::nn::Module lacks in C++. Hooked<M> mixes it into a module.
class HookedModule {
 public:
  virtual ~HookedModule() = default;

  /// Class name for wrap policies (in our models, Hugging Face's class name).
  virtual std::string class_name() const = 0;

  const std::shared_ptr<ForwardHooks>& forward_hooks() const { return hooks_; }
  void set_forward_hooks(std::shared_ptr<ForwardHooks> hooks) { hooks_ = std::move(hooks); }
  const std::shared_ptr<ForwardRunner>& forward_runner() const { return runner_; }
  void set_forward_runner(std::shared_ptr<ForwardRunner> runner) { runner_ = std::move(runner); }

  /// True if a call runs forward and nothing else, so that a caller may fuse it with other operations.
  bool is_transparent() const { return hooks_ == nullptr && runner_ == nullptr; }

  /// Runs a method other than forward with the same hooks (register_fsdp_forward_method):
  ///     decoder->run_as_forward([&](at::Tensor& x) { return decoder->generate(x); }, x)
  /// Arguments are passed as lvalues of the call's own copies; results are returned by value.
  template <class Method, class... Args>
  auto run_as_forward(Method method, Args&&... args) {
    return run_between(hooks_, nullptr, method, std::forward<Args>(args)...);
  }

 protected:
  /// Runs forward(args...) with hooks and runner. The call owns copies of its arguments.
  template <class Forward, class... Args>
  auto run_hooked(Forward forward, Args&&... args) {
    return run_between(hooks_, runner_, forward, std::forward<Args>(args)...);
  }
  void before_conversion() const;
  void before_rebind(const char* operation) const;

 private:
  template <class Forward, class... Args>
  static auto run_between(std::shared_ptr<ForwardHooks> hooks, std::shared_ptr<ForwardRunner> runner, Forward forward,
                          Args&&... args);

  std::shared_ptr<ForwardHooks> hooks_;
  std::shared_ptr<ForwardRunner> runner_;
};

namespace detail {

using TensorPointers = c10::SmallVector<at::Tensor*, 8>;

template <class T>
TensorPointers tensor_pointers(T& value) {
  TensorPointers found;
  auto collect = [&found](at::Tensor& tensor) { found.push_back(&tensor); };
  for_each_tensor(value, collect);
  return found;
}

template <class T>
void replace_tensors(T& value, const std::vector<at::Tensor>& tensors) {
  size_t next = 0;
  auto replace = [&](at::Tensor& tensor) { tensor = tensors.at(next++); };
  for_each_tensor(value, replace);
}

template <class T>
std::vector<at::Tensor> take_tensors(T& value) {
  std::vector<at::Tensor> taken;
  auto take = [&taken](at::Tensor& tensor) { taken.push_back(std::move(tensor)); };
  for_each_tensor(value, take);
  return taken;
}

/// Calls forward_failed() unless dismissed.
struct ForwardFailed {
  ForwardHooks* hooks;
  ~ForwardFailed() {
    if (hooks != nullptr) hooks->forward_failed();
  }
};

/// Runs forward through a ForwardRunner: the body owns the arguments (the runner passes their tensors each time); the
/// first run stores its result here.
template <class Result, class Forward, class Arguments>
Result run_through(ForwardRunner& runner, Forward forward, Arguments arguments) {
  struct State {
    Arguments arguments;
    std::optional<Result> result;
    bool first_run = true;
  };
  const auto inputs = take_tensors(arguments);
  const auto state = std::make_shared<State>(State{std::move(arguments), std::nullopt});
  const ForwardRunner::Body body = [state, forward](const std::vector<at::Tensor>& tensors) {
    auto own = state->arguments;
    replace_tensors(own, tensors);
    Result result = std::apply(forward, own);
    std::vector<at::Tensor> outputs;
    for (const auto* output : tensor_pointers(result)) outputs.push_back(*output);
    if (state->first_run) state->result.emplace(std::move(result));
    state->first_run = false;
    return outputs;
  };
  const auto outputs = runner.run(body, inputs);
  Result result = std::move(*state->result);
  state->result.reset();
  replace_tensors(result, outputs);
  return result;
}

std::string demangled_class_name(const char* type_name);  ///< without namespaces, Hooked<> and "Impl"

}  // namespace detail

/// Keeps hooks and runner alive even if forward replaces them.
template <class Forward, class... Args>
auto HookedModule::run_between(std::shared_ptr<ForwardHooks> hooks, std::shared_ptr<ForwardRunner> runner,
                               Forward forward, Args&&... args) {
  using Result = decltype(forward(std::declval<std::decay_t<Args>&>()...));
  static_assert(!std::is_reference_v<Result> && !std::is_void_v<Result>,
                "a hooked forward returns its outputs by value: backward hooks sit on them");
  if (hooks == nullptr && runner == nullptr) return static_cast<Result>(forward(args...));

  std::tuple<std::decay_t<Args>...> held(std::forward<Args>(args)...);
  detail::ForwardFailed failed{hooks.get()};
  if (hooks) hooks->pre_forward(detail::tensor_pointers(held));
  Result result = runner ? detail::run_through<Result>(*runner, forward, std::move(held))
                         : static_cast<Result>(std::apply(forward, held));
  if (hooks) hooks->post_forward(detail::tensor_pointers(result));
  failed.hooks = nullptr;
  return result;
}

namespace detail {

/// M with hooks. Module::to, clone, save and load call the hooks first. Module::to converts without autograd, because
/// weights are leaves.
template <class M>
class HookedBase : public M, public HookedModule {
 public:
  using M::M;

  std::string class_name() const override {
    if constexpr (requires(const M& module) { module.class_name(); }) {
      return M::class_name();
    } else {
      return demangled_class_name(typeid(M).name());
    }
  }

  /// Calls forward; takes forward's default arguments.
  template <class... Args>
  auto operator()(Args&&... args) {
    return this->run_hooked([this](auto&... each) { return M::forward(each...); }, std::forward<Args>(args)...);
  }

  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override {
    before_conversion();
    const c10::NoGradGuard no_grad;
    M::to(device, dtype, non_blocking);
  }
  void to(torch::Dtype dtype, bool non_blocking = false) override {
    before_conversion();
    const c10::NoGradGuard no_grad;
    M::to(dtype, non_blocking);
  }
  void to(torch::Device device, bool non_blocking = false) override {
    before_conversion();
    const c10::NoGradGuard no_grad;
    M::to(device, non_blocking);
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    before_rebind("save");
    M::save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    before_rebind("load");
    M::load(archive);
  }
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    before_rebind("clone");
    return M::clone(device);
  }
};

template <class Signature>
struct PlainForward : std::false_type {};
template <class C, class R, class... A>
struct PlainForward<R (C::*)(A...)> : std::true_type {
  using Function = R(A...);
};
template <class C, class R, class... A>
struct PlainForward<R (C::*)(A...) const> : PlainForward<R (C::*)(A...)> {};

template <class M, class Function>
class HookedWithSignature;
template <class M, class R, class... A>
class HookedWithSignature<M, R(A...)> : public HookedBase<M> {
 public:
  using HookedBase<M>::HookedBase;
  R forward(A... args) {
    return this->run_hooked([this](auto&... each) -> R { return M::forward(each...); }, std::forward<A>(args)...);
  }
};

template <class M>
class HookedVariadic : public HookedBase<M> {  // for a forward that is overloaded or a template
 public:
  using HookedBase<M>::HookedBase;
  template <class... Args>
  auto forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }
};

template <class M>
auto hooked_base() {
  if constexpr (requires { &M::forward; }) {
    return std::type_identity<HookedWithSignature<M, typename PlainForward<decltype(&M::forward)>::Function>>{};
  } else {
    return std::type_identity<HookedVariadic<M>>{};
  }
}

}  // namespace detail

/// Module type M whose forward runs hooks, as fully_shard and recompute need. M is any class derived from
/// torch::nn::Module with a `forward`. The hooks also run inside ModuleHolder, Sequential and AnyModule.
///     auto block = register_module("block", std::make_shared<Hooked<BlockImpl>>(options));
///     auto y = block->forward(x);
template <class M>
class Hooked : public decltype(detail::hooked_base<M>())::type {
 public:
  using Base = typename decltype(detail::hooked_base<M>())::type;
  using Base::Base;
};

}  // namespace megashard
