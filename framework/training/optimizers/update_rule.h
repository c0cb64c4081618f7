#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/values/value.h"
#include "framework/training/optimizers/optimizer_options.h"

namespace megashard {

/// Parameters that are stepped by one rule with the same numbers, as torch names them in param_groups.
struct ParamGroup {
  std::vector<std::string> params{};  ///< fully qualified names
  double lr = 0;
  double weight_decay = 0;
  double lr_mult = 1;
  double wd_mult = 1;
  double beta1 = 0;  ///< Adam's
  double beta2 = 0;
  size_t rule = 0;  ///< which of the optimizer's rules steps them
};

/// A parameter, and what the optimizer keeps beside it.
struct SteppedParameter {
  std::string name;
  size_t group = 0;  ///< in param_groups()
  at::Tensor parameter;
  at::Tensor main{};                 ///< fp32 copy, or the parameter itself; the sizes of the local shard
  std::vector<at::Tensor> states{};  ///< in the order of UpdateRule::state_names, each of main's sizes
  at::Tensor step{};                 ///< 0-d fp32; undefined: the rule does not count

  bool has_copy() const { return !main.is_same(parameter); }
  /// Whether its gradient, which it has, is of another dtype than what is stepped.
  bool casts_gradient() const { return parameter.grad().scalar_type() != main.scalar_type(); }
};

struct StepContext {
  std::optional<at::Tensor> skip{};  ///< 0-d fp32 on the device, 1 where nothing is to change; unset: 0
  /// Clips and unscales, 0-d fp64: all gradients where a rule takes the factor, else those that are cast, in fp32.
  std::optional<at::Tensor> factor{};
  int64_t cast_elements = 0;  ///< so many elements are cast at once
};

/// How an optimizer changes parameters, and what it keeps of each: AdamW, SGD, Muon.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;

  /// PyTorch's names of what is kept for every element of a parameter: "exp_avg". It starts at 0, and is saved and
  /// loaded under these names.
  virtual std::vector<std::string> state_names() const = 0;
  /// The dtype of the state of that place in state_names(), for what is stepped in `main`.
  virtual at::ScalarType state_dtype(size_t /*state*/, at::ScalarType main) const { return main; }
  /// Whether step() multiplies every gradient by the context's factor, so that nobody has to do it before.
  virtual bool takes_factor() const { return false; }
  /// Whether it keeps a number of steps for each parameter.
  virtual bool counts_steps() const { return false; }
  /// Steps the parameters, all of them of `group`; their step counts are up to date, and grad mode is off. Every rank
  /// passes the same ones in the same order, each with its shard.
  virtual void step(const std::vector<const SteppedParameter*>& parameters, const ParamGroup& group,
                    const StepContext& context) = 0;
  /// The keys of PyTorch's optimizer of that name in param_groups, besides params, lr and weight_decay.
  virtual void describe(const ParamGroup& group, Dict& entry) const = 0;
};

/// The gradient in the dtype of `main`, clipped; a copy where it has to be cast or scaled.
at::Tensor main_gradient(const SteppedParameter& each, const StepContext& context);

/// A rule by which each element of a parameter changes on its own, in one fused kernel for many parameters. Gradients
/// of another dtype than what is stepped are cast bucket by bucket, so that few of the casts live at a time.
class ElementwiseRule : public UpdateRule {
 public:
  void step(const std::vector<const SteppedParameter*>& parameters, const ParamGroup& group,
            const StepContext& context) final;

 protected:
  /// Arguments of a fused kernel: lists of parameters, or of parts of parameters.
  struct KernelLists {
    std::vector<at::Tensor> parameters, gradients, steps;
    std::vector<std::vector<at::Tensor>> states;  ///< for each name of state_names()
  };
  /// The lists are not empty.
  virtual void run_kernel(const KernelLists& lists, const ParamGroup& group,
                          const std::optional<at::Tensor>& skip) const = 0;

 private:
  class Buckets;
};

/// PyTorch's name of the state of SGD and Muon.
inline constexpr const char* kMomentumBuffer = "momentum_buffer";

/// Keys of describe() that torch's AdamW and SGD share, with their defaults.
inline void set_common_keys(Dict& entry) {
  entry.set("maximize", false);
  entry.set("foreach", Value());
  entry.set("differentiable", false);
  entry.set("fused", Value());
}

std::unique_ptr<UpdateRule> make_adamw(const OptimizerOptions& options);
std::unique_ptr<UpdateRule> make_sgd(const OptimizerOptions& options);
std::unique_ptr<UpdateRule> make_muon(const OptimizerOptions& options);

}  // namespace megashard
