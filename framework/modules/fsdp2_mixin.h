#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "framework/modules/deferred_init.h"
#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"
#include "framework/modules/shard_placement.h"
#include "framework/recompute/activation_plan.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/fsdp/unit_plan.h"

namespace megashard {

/// What a program gives FSDP2Mixin::fully_shard besides the file.
struct ShardingRequest {
  ProcessGroupPtr process_group{};  ///< the data parallel ranks
  /// Ranks that share each layer; null: none do. No two of them are in one process_group.
  ProcessGroupPtr tensor_parallel_group{};
  Fsdp2Config config{};
  Strictness strictness = Strictness::kWarn;  ///< of patterns that match nothing
  DiagnosticSink sink{};                      ///< what each pattern matched, warnings
  ActivationPlan activations{};               ///< by flags; the file has its own keys
  std::optional<UnitPlan> unit_plan{};        ///< other units than those of the file's patterns
  /// Not null: the model was constructed under this tape and captured, and is on meta.
  InitTape* init_tape = nullptr;
  /// With init_tape: parameters get memory only, because a checkpoint or weights are loaded next;
  /// buffers are computed in any case.
  bool weights_follow = false;
  /// With init_tape: what the construction has left unset is loaded next; the rest counts.
  bool unset_weights_follow = false;
  bool trains = true;  ///< false: ignored_modules may hold what requires a gradient
};

/// How a model is sharded (mindspeed_mm's FSDP2Mixin), as steps that a model may override. The
/// mixing class must be a module and a HookedModule:
///   class MyModel : public MultiModalModule, public FSDP2Mixin, public WeightInitMixin
class FSDP2Mixin {
 public:
  virtual ~FSDP2Mixin() = default;

  /// Turns requires_grad off where the model's configuration says so. Called by the model's
  /// constructor or by the program, before fully_shard.
  virtual void freeze() {}
  /// _pre_fully_shard, _init_tp_model, _init_ep_model, _fully_shard, _post_fully_shard, in this order.
  void fully_shard(ShardingRequest request);

 protected:
  /// Takes the request and lays the ranks out: sharding_size consecutive ranks share one copy.
  virtual void _pre_fully_shard(ShardingRequest request);
  /// Layers of which this rank has pieces (set_tensor_parallel); throws if they are asked for, unless the
  /// model has its own.
  virtual void _init_tp_model();
  /// Experts on several ranks; throws if the file asks for them, unless the model has its own.
  virtual void _init_ep_model();
  /// set_recompute_modules_to_wrap, set_activation_offload, set_fullyshard_modules_to_wrap, the root where that has
  /// left it out, set_modules_to_prefetch. A model with other ideas overrides it, and calls those of these steps that
  /// it wants, and megashard::fully_shard, the model itself last: what is in no unit by then is told.
  virtual void _fully_shard();
  /// Models constructed under a tape: materialises each rank's rows, then post_meta_init().
  virtual void _post_fully_shard();
  virtual void post_meta_init() {}
  /// Gives parameters on meta memory of undefined contents.
  virtual void to_empty_if_needed(c10::Device device);

  /// Recompute of the file's recompute_modules, or of what the recompute flags name.
  virtual void set_recompute_modules_to_wrap();
  void recompute_matching(const std::vector<std::string>& patterns);
  /// Activation offload of the file's offload_modules and of the flags'. After recompute: around
  /// it.
  void set_activation_offload();
  /// fully_shard of the file's sub_modules_to_wrap, or where it has none of default_modules_to_wrap(), and then of the
  /// model itself. An override may leave the latter to _fully_shard.
  virtual void set_fullyshard_modules_to_wrap();
  /// fully_shard of each match, children before parents.
  void shard_matching(const std::vector<std::string>& patterns);
  void shard_modules(const std::vector<NamedModule>& modules);
  /// Each unit gathers the next `forward` ones ahead, in backward the previous `backward`: all but the root, whichever
  /// call of fully_shard made them, in the order of the model.
  virtual void set_modules_to_prefetch(int forward, int backward);
  /// Patterns used where the file has no sub_modules_to_wrap (_no_split_modules in transformers).
  virtual std::vector<std::string> default_modules_to_wrap() const { return {}; }

  /// Whether inputs of a wrapped module are cast to param_dtype (ROLL's
  /// _fsdp2_cast_forward_inputs); unset: as the file says.
  virtual std::optional<bool> cast_forward_inputs(const NamedModule& /*each*/) const { return std::nullopt; }

  /// Where modules of Megatron's layout are in this model, for patterns of the FSDP2 file: {"decoder.layers",
  /// "model.layers"}. The first that begins a pattern counts.
  virtual OtherPaths megatron_paths() const { return {}; }

  /// Patterns of the model's parts by Megatron's names for recompute and offload flags (see
  /// ActivationPlan); none: the model does not have it.
  virtual std::vector<std::string> patterns_of_part(const std::string& part) const {
    return part == "layer" ? default_modules_to_wrap() : std::vector<std::string>{};
  }

  /// For _init_ep_model: these parameters are sharded over `mesh` and not over the model's.
  void shard_over(DeviceMeshPtr mesh, std::function<bool(const at::Tensor& parameter)> which);

  const ShardingRequest& request() const { return request_; }
  const FullyShardOptions& options() const { return options_; }  ///< for calls of fully_shard

 private:
  torch::nn::Module& module();
  void shard_root();  ///< unless it is under fully_shard already
  void check_moe_modules();
  void check_ignored_modules();
  /// After everything has said where it wants parameters.
  void set_shard_placements();
  /// What several ranks hold becomes what the first of them has: each may have drawn its own
  /// values.
  void make_copies_equal();
  std::vector<NamedModule> select(const std::vector<std::string>& patterns, const std::string& key);
  /// The modules that flags name: of "layer" the first `layers`.
  std::vector<NamedModule> select_parts(const std::vector<std::string>& parts, std::optional<int64_t> layers,
                                        const std::string& flag);

  ShardingRequest request_;
  FullyShardOptions options_;
  detail::ShardPlacements placements_;
  std::vector<NamedModule> wrapped_;  // by shard_modules, so with the file's policy
};

}  // namespace megashard
