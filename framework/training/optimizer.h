#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/training/optimizers/optimizer_options.h"
#include "framework/training/optimizers/update_rule.h"
#include "parallel/fsdp/grad_norm.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

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
  /// What reads clipped gradients calls clip_grad_norm_ (grad_norm.h) instead.
  at::Tensor clip_grad_norm(double max_norm, const at::Tensor& loss_scale = {});
  void zero_grad();

  void set_lr(double lr);                      ///< times each group's lr_mult
  void set_weight_decay(double weight_decay);  ///< times each group's wd_mult
  const std::vector<ParamGroup>& param_groups() const { return param_groups_; }
  /// What PyTorch and Megatron keep of a group.
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
  std::optional<at::Tensor> factor_;  // of gradients that step() casts, or all of a rule's
};

inline std::unique_ptr<Optimizer> make_optimizer(const NamedTensors& named_parameters,
                                                 const OptimizerOptions& options) {
  return std::make_unique<Optimizer>(named_parameters, options);
}

}  // namespace megashard
