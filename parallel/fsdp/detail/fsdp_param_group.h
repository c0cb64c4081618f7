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

/// Where a group's parameters stand (ShardedState).
enum class ShardedState {
  kSharded,
  kShardedPostForward,  ///< over fewer ranks: reshard_after_forward of a number
  kUnsharding,          ///< the all-gather is under way; the parameters are still sharded
  kUnsharded,
  kSizesOnly,  ///< unsharded sizes, and no data: for a backward that needs no weights
};

/// The run-time controls. Those of reductions may change at any time; after a change of how gathers travel
/// (comm.all_gather, comm.memory, unshard_async_op) or of an extension, forget_all_gathers.
struct GroupControls {
  ReshardAfterForward reshard_after_forward;
  bool reshard_after_backward = true;
  bool is_last_microbatch = true;
  bool reshards_one_by_one = true;  ///< in backward, as gradients get complete
  bool unshard_in_backward = true;
  bool unshard_async_op = false;  ///< gathers are packed on the compute stream
  bool reduce_grads = true;
  bool all_reduce_grads = true;
  CommOptions comm;
};

/// The parameters of one fully_shard call, unsharded and reduced together (FSDPParamGroup): unshard starts the
/// all-gather, wait_for_unshard gives the unsharded parameters on the current stream, reshard frees them. See
/// docs/group_life_cycle.md.
class FsdpParamGroup : public GroupControls {
 public:
  FsdpParamGroup(const std::vector<std::pair<std::string, at::Tensor>>& parameters, ShardLayout layout,
                 const FullyShardOptions& options);
  /// Of parameters that take_params() of other groups gave, with the layout and the controls of `like`.
  FsdpParamGroup(FsdpParams params, const FsdpParamGroup& like);
  ~FsdpParamGroup();
  FsdpParamGroup(const FsdpParamGroup&) = delete;
  FsdpParamGroup& operator=(const FsdpParamGroup&) = delete;

  const FsdpParams& params() const { return params_; }
  FsdpParams take_params();  ///< sharded, with no gradients on their way
  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  const FsdpState* state() const { return state_; }  ///< that has it
  void set_state(const FsdpState* state) { state_ = state; }
  const ShardLayout& layout() const { return layout_; }
  const MixedPrecisionPolicy& policy() const { return policy_; }
  ShardedState sharded_state() const { return sharded_state_; }

  /// Joins the units of the context; throws for parameters that are still on meta, naming them.
  void lazy_init(const std::shared_ptr<FsdpContext>& context);
  /// To the root's context, from the unit's own (FsdpState::ensure_context). No-op before lazy_init.
  void move_to(const std::shared_ptr<FsdpContext>& context);

  void unshard();                          ///< starts; no-op when unsharding or unsharded
  void wait_for_unshard(bool in_forward);  ///< the parameters become unsharded
  void show_unsharded_sizes();
  void reshard();             ///< from whatever state; throws if a parameter was changed in place while unsharded
  void reshard_if_partial();  ///< if reshard_when_complete has begun to: it can be unsharded again
  void reshard_if_idle();     ///< unless a forward or backward of the root is running
  void post_forward();        ///< reshards as reshard_after_forward says; kept for a backward only
  /// If not, then what is not resharded after forward either stays for the next microbatch.
  bool reshards_after_backward() const;
  void set_of_root() { of_root_ = true; }  ///< by default, the root's stays unsharded until backward
  bool owns_unsharded(const c10::StorageImpl* storage) const;

  void set_aside_sharded_grads();
  /// The running backward has no more gradients for a parameter: it is resharded before the others, unless it is in
  /// use.
  void reshard_when_complete(FsdpParam& param);
  /// Sets this backward's gradients aside, unreduced (accumulation without communication).
  void accumulate_unsharded_grads();
  /// A backward without reduction, or one without all-reduce, waits for one with it.
  bool owes_reduction() const;
  /// Starts the reduction of what backward accumulated since the last one. Collective whatever gradients this rank has:
  /// another rank may have more. The sharded gradients are there after wait_for_reduce_scatter and, with replicas,
  /// wait_for_all_reduce.
  void reduce();
  void wait_for_reduce_scatter();
  void wait_for_all_reduce();
  /// Under CPU offload, the host waits: for gradients that come, and for gathers that read the sharded parameters,
  /// which the host may write then.
  void wait_for_host_memory();
  /// Gradients that wait for a reduction or for an all-reduce across replicas.
  bool has_pending_grads() const { return unreduced_ || !partial_.empty(); }
  void clear_pending_grads();
  void synchronize_grads();  ///< reduces them now; collective
  /// Backward threw: the group is sharded again, with the gradients from before it, and those of reductions that it had
  /// started.
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
  bool unreduced_ = false;  // a backward set its gradients aside
  int backward_ = -1;       // the engine's number of the one that set sharded gradients aside
  bool partial_reshard_ = false;
  ForeachAllGather all_gather_;
  ForeachAllGather post_forward_all_gather_;  // over fewer ranks
  ForeachAllGather* unsharding_ = nullptr;
  StreamEvent shards_read_;  // CPU offload: the last gather has read the sharded parameters
  std::unique_ptr<Reduction> reduction_;
  std::vector<at::Tensor> partial_;  // HSDP: sums, by buffer, that wait for a backward with all-reduce
};

}  // namespace megashard
