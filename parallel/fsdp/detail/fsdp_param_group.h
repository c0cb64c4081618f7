#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/fsdp/detail/foreach_all_gather.h"
#include "parallel/fsdp/detail/foreach_reduce.h"
#include "parallel/fsdp/detail/fsdp_context.h"
#include "parallel/fsdp/detail/fsdp_param.h"

namespace megashard {

/// State of a group's parameters (ShardedState).
enum class ShardedState {
  kSharded,
  kShardedPostForward,  ///< over fewer ranks: reshard_after_forward with a number
  kUnsharding,          ///< all-gather in flight; parameters still sharded
  kUnsharded,
  kSizesOnly,  ///< unsharded sizes without data, for a backward that needs no weights
};

/// Run-time controls. Those of reductions may change at any time. Call forget_all_gathers after a change of
/// comm.all_gather, comm.memory, unshard_async_op or an extension.
struct GroupControls {
  ReshardAfterForward reshard_after_forward;
  bool reshard_after_backward = true;
  bool is_last_microbatch = true;
  bool reshards_one_by_one = true;  ///< in backward, as gradients become complete
  bool unshard_in_backward = true;
  bool keep_unsharded_storage = false;
  bool unshard_async_op = false;  ///< packs all-gathers on the compute stream
  bool reduce_grads = true;
  bool all_reduce_grads = true;
  CommOptions comm;
};

/// Parameters of one fully_shard call, unsharded and reduced together (FSDPParamGroup): unshard starts the all-gather,
/// wait_for_unshard makes the parameters unsharded on the current stream, reshard frees them. See
/// docs/group_life_cycle.md.
class FsdpParamGroup : public GroupControls {
 public:
  FsdpParamGroup(const std::vector<std::pair<std::string, at::Tensor>>& parameters, ShardLayout layout,
                 const FullyShardOptions& options);
  /// Takes parameters from take_params() of other groups; layout and controls from `like`.
  FsdpParamGroup(FsdpParams params, const FsdpParamGroup& like);
  ~FsdpParamGroup();
  FsdpParamGroup(const FsdpParamGroup&) = delete;
  FsdpParamGroup& operator=(const FsdpParamGroup&) = delete;

  const FsdpParams& params() const { return params_; }
  FsdpParams take_params();  ///< only if sharded and without pending gradients
  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  const FsdpState* state() const { return state_; }  ///< its owner
  void set_state(const FsdpState* state) { state_ = state; }
  const ShardLayout& layout() const { return layout_; }
  const MixedPrecisionPolicy& policy() const { return policy_; }
  ShardedState sharded_state() const { return sharded_state_; }

  /// Joins the context's units. Throws for parameters that are still on meta and names them.
  void lazy_init(const std::shared_ptr<FsdpContext>& context);
  /// Moves from the unit's own context (FsdpState::ensure_context) to the root's. No-op before lazy_init.
  void move_to(const std::shared_ptr<FsdpContext>& context);

  void unshard();                          ///< starts the all-gather; no-op if unsharding or unsharded
  void wait_for_unshard(bool in_forward);  ///< makes the parameters unsharded
  void show_unsharded_sizes();
  void reshard();             ///< from any state; throws if a parameter was changed in place while unsharded
  void reshard_if_partial();  ///< if reshard_when_complete has started, so that it can be unsharded again
  void reshard_if_idle();     ///< unless forward or backward of the root runs
  void post_forward();        ///< follows reshard_after_forward; stays unsharded only if a backward follows
  /// If false, a group that is not resharded after forward stays unsharded for the next microbatch.
  bool reshards_after_backward() const;
  void set_of_root() { of_root_ = true; }  ///< the root's group by default stays unsharded until backward
  bool owns_unsharded(const c10::StorageImpl* storage) const;

  void set_aside_sharded_grads();
  /// Called when a parameter's gradient is complete in the running backward: reshards it before the others unless it is
  /// in use.
  void reshard_when_complete(FsdpParam& param);
  /// Keeps this backward's gradients unreduced (accumulation without communication).
  void accumulate_unsharded_grads();
  /// True if a backward without reduction or without all-reduce waits for one with it.
  bool owes_reduction() const;
  /// Starts the reduction of gradients accumulated since the last one. Collective even if this rank has no gradient:
  /// another rank may have one. Sharded gradients are ready after wait_for_reduce_scatter and, with replicas,
  /// wait_for_all_reduce.
  void reduce();
  void wait_for_reduce_scatter();
  void wait_for_all_reduce();
  /// CPU offload: blocks the host until gradients have arrived and gathers have read the sharded parameters, which the
  /// host may write then.
  void wait_for_host_memory();
  /// True if gradients wait for a reduction or for an all-reduce across replicas.
  bool has_pending_grads() const { return unreduced_ || !partial_.empty(); }
  void clear_pending_grads();
  void synchronize_grads();  ///< reduces pending gradients now; collective
  /// Backward threw: reshards; restores the gradients from before it and adds those of reductions already started.
  void abandon_backward() noexcept;

  void forget_all_gathers();

 private:
  bool reset_sharded_params();
  void init_all_gather();
  bool gradients_are_views() const;
  void assign_grads();
  void assign_grads_on(const c10::Stream& stream);

  std::string name_;
  const FsdpState* state_ = nullptr;
  ShardLayout layout_;
  MixedPrecisionPolicy policy_;
  UnusedParameters unused_;
  FsdpParams params_;
  std::shared_ptr<FsdpContext> context_;
  ShardedState sharded_state_ = ShardedState::kSharded;
  bool of_root_ = false;
  bool unreduced_ = false;  // a backward left its gradients unreduced
  int backward_ = -1;       // engine's number of the backward that set sharded gradients aside
  bool partial_reshard_ = false;
  ForeachAllGather all_gather_;
  ForeachAllGather post_forward_all_gather_;  // over fewer ranks
  ForeachAllGather* unsharding_ = nullptr;
  StreamEvent shards_read_;  // CPU offload: the last all-gather has read the sharded parameters
  std::unique_ptr<Reduction> reduction_;
  std::vector<at::Tensor> partial_;  // HSDP: sums per buffer that wait for a backward with all-reduce
};

}  // namespace megashard
