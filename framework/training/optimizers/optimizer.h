#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/values/value.h"
#include "framework/training/optimizers/optimizer_options.h"
#include "parallel/fsdp/grad_norm.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

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

/// Steps the parameters of a model in place: sharded ones (each rank its own rows), whole ones, or
/// both. Made after fully_shard. fp32 parameters are updated where they are; parameters stored in
/// fp16 or bf16 keep an fp32 copy here, which is stepped and copied back (Megatron's --bf16).
/// Gradients of another dtype are cast, some at a time.
class Optimizer {
 public:
  /// Over the parameters that require a gradient, each once (tied ones under their first name).
  Optimizer(const NamedTensors& named_parameters, const OptimizerOptions& options);

  /// Parameters without a gradient are left alone, and their step count too. `skip`: a 0-d fp32
  /// tensor on the parameters' device, 1 where nothing is to change, else 0: the host need not
  /// know. Undefined: 0. Collective where a rule needs whole matrices.
  void step(const at::Tensor& skip = {});
  /// Clips what step() will use to max_norm and returns the norm before; 0: only measures.
  /// `loss_scale`: the gradients are that many times too large (0-d, GradScaler), and what step()
  /// uses is divided by it at the same time; the norm is that of the true ones.
  /// Collective. Call it once between backward and step. Where AdamW steps, `.grad` stays as backward
  /// left it: step() multiplies as it reads. Elsewhere so do gradients of another dtype than what is
  /// stepped, which are scaled in fp32, as Megatron's main grads; the others are multiplied here.
  /// A caller that reads clipped gradients calls clip_grad_norm_ (grad_norm.h) instead.
  at::Tensor clip_grad_norm(double max_norm, const at::Tensor& loss_scale = {});
  void zero_grad();

  void set_lr(double lr);                      ///< times each group's lr_mult
  void set_weight_decay(double weight_decay);  ///< times each group's wd_mult
  const std::vector<ParamGroup>& param_groups() const { return param_groups_; }
  /// The group's entry in a checkpoint of PyTorch or Megatron.
  Dict describe(const ParamGroup& group) const;
  /// Stepped parameters without duplicates, in the order of the model.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  /// This rank's pieces of the state: optimizer.state.<name>.<state name of its rule>, .step (0-d
  /// fp32) where the rule counts, and .fp32_param where there is an fp32 copy. They alias the state:
  /// reading a checkpoint into them loads it. Names are those of torch's get_optimizer_state_dict.
  ShardedTensors sharded_state_dict();

  /// Takes the fp32 copies of the parameters of those names anew from them, after they were loaded
  /// without such copies.
  void reload_model_parameters(const std::function<bool(const std::string& name)>& is_stale);

 private:
  static void check_sizes(const SteppedParameter& each);

  std::vector<std::unique_ptr<UpdateRule>> rules_;
  std::vector<ParamGroup> param_groups_;
  std::vector<SteppedParameter> stepped_;
  std::vector<at::Tensor> parameters_;
  int64_t cast_elements_;
  std::optional<at::Tensor> factor_;  // multiplies gradients that step() casts, or all gradients of a rule
};

inline std::unique_ptr<Optimizer> make_optimizer(const NamedTensors& named_parameters,
                                                 const OptimizerOptions& options) {
  return std::make_unique<Optimizer>(named_parameters, options);
}

}  // namespace megashard
