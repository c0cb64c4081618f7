#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/activation_plan.h"
#include "framework/modules/deferred_init.h"
#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"
#include "framework/modules/shard_placement.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/fsdp/unit_plan.h"

namespace megashard {

/// Input of FSDP2Mixin::fully_shard besides the file.
struct ShardingRequest {
  ProcessGroupPtr process_group{};  ///< data parallel ranks
  /// Ranks that share each layer; null: no tensor parallelism. A process_group contains only one of them.
  ProcessGroupPtr tensor_parallel_group{};
  Fsdp2Config config{};
  Strictness strictness = Strictness::kWarn;  ///< for patterns without matches
  DiagnosticSink sink{};                      ///< receives matches of each pattern, and warnings
  ActivationPlan activations{};               ///< from flags; the file has its own keys
  std::optional<UnitPlan> unit_plan{};        ///< replaces the units of the file's patterns
  /// If set, the model was constructed under this tape, was captured, and is on meta.
  InitTape* init_tape = nullptr;
  /// With init_tape: parameters are only allocated, because weights are loaded next. Buffers are computed.
  bool weights_follow = false;
  /// With init_tape: tensors that the construction left unset are loaded next; the others are computed.
  bool unset_weights_follow = false;
  bool trains = true;  ///< false: ignored_modules may contain parameters that require gradients
};

/// Shards a model (mindspeed_mm's FSDP2Mixin) in steps that the model may override. The derived class must be a module
/// and a HookedModule:
///   class MyModel : public MultiModalModule, public FSDP2Mixin, public WeightInitMixin
class FSDP2Mixin {
 public:
  virtual ~FSDP2Mixin() = default;

  /// Turns requires_grad off as configured by the model. Called by its constructor or by the program before
  /// fully_shard.
  virtual void freeze() {}
  /// True for parameters and buffers that are stored and computed in fp32, whatever --bf16 and param_dtype say
  /// (transformers' _keep_in_fp32_modules). `name`: fully qualified.
  virtual bool keeps_fp32(const std::string& /*name*/) const { return false; }
  /// Casts floating-point parameters and buffers to `dtype` (--bf16), except those of keeps_fp32(). Call it
  /// before fully_shard.
  void store_in(at::ScalarType dtype);
  /// Calls _pre_fully_shard, _init_tp_model, _init_ep_model, _fully_shard, _post_fully_shard, in this order.
  void fully_shard(ShardingRequest request);

  /// Paths that modules have in Megatron or in published files, for patterns that name no module of this model:
  /// {"decoder.layers", "model.layers"}. The first one that begins a pattern is used.
  virtual OtherPaths other_paths() const { return {}; }

 protected:
  /// Stores the request and creates the mesh: sharding_size consecutive ranks form a shard group.
  virtual void _pre_fully_shard(ShardingRequest request);
  /// Applies tensor parallelism (set_tensor_parallel). Throws if it is requested, unless the model overrides it.
  virtual void _init_tp_model();
  /// Applies expert parallelism. Throws if the file requests it, unless the model overrides it.
  virtual void _init_ep_model();
  /// Calls set_recompute_modules_to_wrap, set_activation_offload, set_fullyshard_modules_to_wrap, fully_shard of the
  /// root if that skipped it, and set_modules_to_prefetch. An override may call any of these steps and
  /// megashard::fully_shard, for the model itself last. Parameters in no unit are then reported.
  virtual void _fully_shard();
  /// For models constructed under a tape: materialises each rank's shards, then calls post_meta_init().
  virtual void _post_fully_shard();
  virtual void post_meta_init() {}
  /// Allocates meta parameters with undefined contents.
  virtual void to_empty_if_needed(c10::Device device);

  /// Enables recompute for the file's recompute_modules, or for the parts named by recompute flags.
  virtual void set_recompute_modules_to_wrap();
  void recompute_matching(const std::vector<std::string>& patterns);
  /// Enables activation offload for the file's offload_modules and for the flags'. Call it after recompute, which it
  /// encloses.
  void set_activation_offload();
  /// Calls fully_shard for the groups of the file's wrap_policy, else for its sub_modules_to_wrap, else for
  /// default_modules_to_wrap(); then for the model itself. An override may leave the latter to _fully_shard.
  virtual void set_fullyshard_modules_to_wrap();
  /// Calls fully_shard for each match, children before parents.
  void shard_matching(const std::vector<std::string>& patterns);
  void shard_modules(const std::vector<NamedModule>& modules);
  /// Prefetches the next `forward` units in forward and the previous `backward` units in backward, for all units except
  /// the root in the order of the model, whichever fully_shard call created them.
  virtual void set_modules_to_prefetch(int forward, int backward);
  /// Patterns if the file has no sub_modules_to_wrap (_no_split_modules in transformers).
  virtual std::vector<std::string> default_modules_to_wrap() const { return {}; }

  /// Casts inputs of a wrapped module, or of the model, whose path is empty, to param_dtype (ROLL's
  /// _fsdp2_cast_forward_inputs); unset: as in the file.
  virtual std::optional<bool> cast_forward_inputs(const NamedModule& /*each*/) const { return std::nullopt; }

  /// Patterns of a model part by Megatron's name, for recompute and offload flags (see ActivationPlan); empty if the
  /// model lacks the part.
  virtual std::vector<std::string> patterns_of_part(const std::string& part) const {
    return part == "layer" ? default_modules_to_wrap() : std::vector<std::string>{};
  }

  /// Parameters that stack matrices over their leading dimensions, as experts: ranks get whole matrices, or parts of
  /// one (ShardPlacement::leading_dims).
  virtual std::unordered_set<const c10::TensorImpl*> stacked_parameters() const { return {}; }
  /// For _init_ep_model: shards these parameters over `mesh` instead of the model's.
  void shard_over(DeviceMeshPtr mesh, std::function<bool(const at::Tensor& parameter)> which);

  const ShardingRequest& request() const { return request_; }
  const FullyShardOptions& options() const { return options_; }  ///< for calls of fully_shard

 private:
  torch::nn::Module& module();
  FullyShardOptions options_for(const NamedModule& each) const;
  void shard_root();  ///< skipped if fully_shard was called already
  void check_moe_modules();
  void check_ignored_modules();
  /// Call it after all placements are known.
  void set_shard_placements();
  /// Broadcasts replicated tensors from the first rank that has them, because each rank may have drawn its own values.
  void make_copies_equal();
  std::vector<NamedModule> select(const std::vector<std::string>& patterns, const std::string& key);
  /// The modules of parts named by flags; for "layer" the first `layers`.
  std::vector<NamedModule> select_parts(const std::vector<std::string>& parts, std::optional<int64_t> layers,
                                        const std::string& flag);

  ShardingRequest request_;
  FullyShardOptions options_;
  detail::ShardPlacements placements_;
  std::vector<NamedModule> wrapped_;  // by shard_modules, with the file's policy
};

}  // namespace megashard
