#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/fsdp/grad_norm.h"
#include "parallel/fsdp/sharded_tensor.h"

namespace megashard {

enum class OptimizerKind { kAdam, kSgd };  ///< kAdam is AdamW, as Megatron's `--optimizer adam`

struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdam;
  double lr = 1e-3;
  double weight_decay = 0.01;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0.9;  ///< SGD
  /// Gradients of another dtype than what is stepped are cast so many elements at once; a multiple
  /// of 64.
  int64_t cast_elements = int64_t{1} << 24;
};

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Parameters that are stepped with the same numbers, as torch names them in param_groups.
struct ParamGroup {
  std::vector<std::string> params;  ///< fully qualified names
  double lr = 0;
  double weight_decay = 0;
  double wd_mult = 1;  ///< 0 for biases and 1-D parameters (Megatron's rule): no decay
};

/// Steps the parameters of a model in place: sharded ones (each rank its own rows), whole ones, or
/// both. Made after fully_shard. fp32 parameters are updated by one fused kernel per group;
/// parameters stored in fp16 or bf16 keep an fp32 copy here, which is stepped and copied back
/// (Megatron's --bf16). Gradients of another dtype are cast, some at a time.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// Parameters without a gradient are left alone, and their step count too. `skip`: a 0-d fp32
  /// tensor on the parameters' device, 1 where nothing is to change, else 0: the host need not
  /// know. Undefined: 0.
  void step(const at::Tensor& skip = {});
  /// Clips what step() will use to max_norm and returns the norm before; 0: only measures.
  /// Collective. Call it once between backward and step: gradients of fp16 and bf16 parameters are
  /// scaled in fp32, as Megatron's main grads, and when they are cast: in step().
  at::Tensor clip_grad_norm(double max_norm);
  /// For the norm: of these parameters other ranks have others.
  void set_parts(PartsOfRanks parts) { parts_ = std::move(parts); }
  void zero_grad();

  void set_lr(double lr);
  void set_weight_decay(double weight_decay);  ///< of the groups whose wd_mult is not 0
  const std::vector<ParamGroup>& param_groups() const { return param_groups_; }
  /// As it was made; the learning rate may have moved on.
  const OptimizerOptions& options() const { return options_; }
  /// Stepped parameters without duplicates, in the order of the model.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  /// This rank's pieces of the state: optimizer.state.<name>.exp_avg, .exp_avg_sq, .step (0-d fp32)
  /// or .momentum_buffer, and .fp32_param where there is an fp32 copy. They alias the state:
  /// reading a checkpoint into them loads it. Names are those of torch's get_optimizer_state_dict.
  ShardedTensors sharded_state_dict();

  /// Takes the fp32 copies of the parameters of those names anew from them, after they were loaded
  /// without such copies.
  void reload_model_parameters(const std::function<bool(const std::string& name)>& is_stale);

 protected:
  /// What is kept for one parameter; undefined tensors are not used by this optimizer.
  struct Slot {
    std::string name;
    size_t group = 0;  // in param_groups_
    at::Tensor parameter;
    at::Tensor main;     // fp32 copy, or the parameter itself
    at::Tensor exp_avg;  // sizes of the local shard, as all state
    at::Tensor exp_avg_sq;
    at::Tensor step;  // 0-d fp32
    at::Tensor momentum_buffer;

    bool has_copy() const { return !main.is_same(parameter); }
  };

  /// What one fused kernel call takes, parameter by parameter, or parts of parameters.
  struct KernelLists {
    std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps, momentum_buffers;
  };

  Optimizer(const NamedTensors& named_parameters, const OptimizerOptions& options);
  /// Steps the parameters of one group, whose step counts are up to date; grad mode is off, the
  /// lists are not empty.
  virtual void run_kernel(const KernelLists& lists, const ParamGroup& group,
                          const std::optional<at::Tensor>& skip) const = 0;

  std::vector<Slot> slots_;

 private:
  struct Clip {
    double max_norm;
    at::Tensor norm;
  };
  class Buckets;

  static void check_sizes(const Slot& slot);

  std::vector<ParamGroup> param_groups_;
  OptimizerOptions options_;
  std::vector<at::Tensor> parameters_;
  PartsOfRanks parts_;
  std::optional<Clip> clip_;  // of gradients that step() casts
};

/// Over the parameters that require a gradient, each once (tied ones under their first name).
std::unique_ptr<Optimizer> make_optimizer(const NamedTensors& named_parameters,
                                          const OptimizerOptions& options);

}  // namespace megashard
