#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/fsdp/fsdp_context.h"
#include "parallel/fsdp/fsdp_param.h"
#include "parallel/fsdp/gather_plan.h"
#include "parallel/fsdp/gradient_scaling.h"

namespace megashard {

struct GradientReduction;

/// How a group communicates, where that is not as its options say: the run-time controls.
struct GroupCommunication {
  std::shared_ptr<AllGather> all_gather{};
  std::shared_ptr<ReduceScatter> reduce_scatter{};
  std::optional<GroupMemory> memory{};  // of buffers; none: the allocator's
  bool async_op = false;                // gathers are packed on the compute stream
  std::function<void(at::Tensor&)> all_reduce_hook{};
  std::optional<c10::Stream> all_reduce_hook_stream{};  // none: that of the reduction
  std::optional<double> divide_factor{};
  bool force_sum = false;
};

/// The parameters of one fully_shard call, gathered and reduced together (FSDPParamGroup). Three
/// verbs: gather starts the collective, wait gives the full parameters on the current stream,
/// release frees them. See docs/group_life_cycle.md.
class FsdpGroup {
 public:
  FsdpGroup(const std::vector<std::pair<std::string, at::Tensor>>& parameters, ShardLayout layout,
            const FullyShardOptions& options);
  ~FsdpGroup();

  const std::vector<std::unique_ptr<FsdpParam>>& params() const { return params_; }
  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  const ShardLayout& layout() const { return layout_; }

  /// Fixes dtypes and plans on first use; throws for parameters that are still on meta, naming
  /// them.
  void prepare(FsdpContext& context);

  enum class State { kSharded, kPostForward, kGathering, kFull, kShapeOnly };
  State state() const { return state_; }
  void gather();                 ///< starts; no-op when gathering or full
  void wait(bool in_forward);    ///< the parameters become full
  void show_shapes();            ///< the parameters have their whole sizes, and no data: for a
                                 ///< backward that needs no weights
  void release();                ///< the parameters become sharded, whatever state they were in;
                                 ///< throws if one was changed in place while it was full
  void release_incomplete();     ///< if gradient_complete has begun to: it can be gathered again
  void release_if_idle();        ///< unless a forward or backward of the root is running
  void release_after_forward();  ///< as reshard_after_forward says; kept for a backward only
  void set_of_root() { of_root_ = true; }  ///< by default, the root's stays full until backward
  bool owns_full(const c10::StorageImpl* storage) const;

  void stash_gradients();
  /// The running backward has no more gradients for a parameter: its full storage goes before the
  /// others', unless it is in use.
  void gradient_complete(FsdpParam& param);
  /// Sets this backward's gradients aside, unreduced (accumulation without communication).
  void accumulate_gradients();
  /// A backward without reduction, or one without all-reduce, waits for one with it.
  bool owes_reduction() const;
  /// Starts the reduction of what backward accumulated, since the last reduction, in the group's
  /// parameters. Collective whatever gradients this rank has: another rank may have more. The
  /// sharded gradients are there after finish_reduce and, with replicas, finish_all_reduce.
  void start_reduce();
  void finish_reduce();
  void finish_all_reduce();
  /// Under CPU offload, the host waits: for gradients that come, and for gathers that read the rows,
  /// which the host may write then.
  void wait_for_host_memory();
  /// Gradients that wait for a reduction or for an all-reduce across replicas.
  bool has_pending_gradients() const { return unreduced_ || !partial_.empty(); }
  void clear_pending_gradients();
  void synchronize_gradients();  ///< reduces them now; collective
  /// Backward threw: the group is sharded again, with the gradients from before it, and those of
  /// reductions that it had started.
  void abandon_backward() noexcept;

  ReshardAfterForward reshard_after_forward;
  bool reshard_after_backward = true;
  bool releases_one_by_one = true;  ///< in backward, as gradients get complete
  bool unshard_in_backward = true;
  bool reduce_gradients = true;
  bool all_reduce_gradients = true;
  const GroupCommunication& communication() const { return communication_; }
  void set_communication(GroupCommunication communication);
  void set_extension(FsdpParam& param, std::shared_ptr<AllGatherExtension> extension);

 private:
  /// Parameters of at least this many bytes a rank are reduced where backward left them, on a CPU.
  static constexpr int64_t kDirectBytes = 256 * 1024;

  void make_plans();
  void change_plans();
  GatherPlan::Options plan_options() const;
  at::ScalarType reduce_dtype() const;
  GradientScaling scaling() const;
  int replicas() const;
  at::Tensor new_buffer(int64_t numel, at::ScalarType dtype) const;
  at::Tensor take_gradient(FsdpParam& param) const;
  int64_t flags_per_param() const;
  void pack_gradients(GradientReduction& reduction);
  void scatter(GradientReduction& reduction);
  bool reduces_in_place() const;
  void assign_gradients();
  void assign_gradients_on(const c10::Stream& stream);

  std::string name_;
  ShardLayout layout_;
  MixedPrecisionPolicy policy_;
  UnusedParameters unused_;
  GroupCommunication communication_;
  std::vector<std::unique_ptr<FsdpParam>> params_;
  FsdpContext* context_ = nullptr;
  bool prepared_ = false;
  State state_ = State::kSharded;
  bool of_root_ = false;
  bool unreduced_ = false;  // a backward set its gradients aside
  int backward_ = -1;       // the engine's number of the one that stashed gradients
  bool some_released_ = false;
  GatherPlan rows_plan_;
  GatherPlan slices_plan_;  // after forward, over fewer ranks
  GatherPlan* gathering_ = nullptr;
  StreamEvent rows_read_;  // CPU offload: the last gather has read the rows
  std::unique_ptr<GradientReduction> reduction_;
  std::vector<at::Tensor>
      partial_;  // HSDP: sums, by buffer, that wait for a backward with all-reduce
};

}  // namespace megashard
