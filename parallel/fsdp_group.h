#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parallel/fsdp_context.h"
#include "parallel/fsdp_param.h"
#include "parallel/fully_shard.h"

namespace megashard {

struct GradientReduction;

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

  enum class State { kSharded, kPostForward, kGathering, kFull };
  State state() const { return state_; }
  void gather();                 ///< starts; no-op when gathering or full
  void wait(bool in_forward);    ///< the parameters become full
  void release();                ///< the parameters become sharded, whatever state they were in;
                                 ///< throws if one was changed in place while it was full
  void release_if_idle();        ///< unless a forward or backward of the root is running
  void release_after_forward();  ///< as reshard_after_forward says; kept for a backward only
  void set_of_root() { of_root_ = true; }  ///< by default, the root's stays full until backward
  bool owns_full(const c10::StorageImpl* storage) const;

  void stash_gradients();
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
  /// Backward threw: the group is sharded again, with the gradients from before it, and those of
  /// reductions that it had started.
  void abandon_backward() noexcept;

  ReshardAfterForward reshard_after_forward;
  bool reshard_after_backward = true;
  bool reduce_gradients = true;
  bool all_reduce_gradients = true;

 private:
  /// A parameter's place in a gather: rank r supplies bytes [r * chunk, (r + 1) * chunk) of the
  /// full parameter.
  struct Piece {
    FsdpParam* param;
    int64_t chunk_bytes;
    int64_t packed_offset;  // in each rank's part of the packed buffer; kDirect: travels without it
    at::Tensor kept;        // post-forward plan: this rank's slice, uint8 [chunk_bytes]
  };
  static constexpr int64_t kDirect = -1;
  /// On a CPU, parameters whose pieces are at least this large travel without the packed buffer:
  /// two copies less. Below, the latency of one more collective costs more than the copies.
  static constexpr int64_t kDirectBytes = 256 * 1024;
  struct GatherPlan {
    ProcessGroupPtr group;
    bool from_shards = true;  // else from the kept slices
    std::vector<Piece> pieces;
    int64_t packed_bytes = 0;  // per rank
  };

  GatherPlan plan_gather(ProcessGroupPtr group, bool from_shards) const;
  void make_post_forward_plan();
  void start_gather();
  void finish_gather();
  void copy_in(const Piece& piece, const at::Tensor& destination) const;
  void copy_out(const Piece& piece, const at::Tensor& packed) const;
  at::ScalarType reduce_dtype() const;
  at::Tensor take_gradient(FsdpParam& param) const;
  void pack_gradients(GradientReduction& reduction);
  void scatter(GradientReduction& reduction);
  void assign_gradients(GradientReduction& reduction);

  std::string name_;
  ShardLayout layout_;
  MixedPrecisionPolicy policy_;
  std::vector<std::unique_ptr<FsdpParam>> params_;
  FsdpContext* context_ = nullptr;
  State state_ = State::kSharded;
  bool of_root_ = false;
  bool unreduced_ = false;  // a backward set its gradients aside
  GatherPlan shard_plan_;
  GatherPlan post_forward_plan_;
  GatherPlan* gathering_ = nullptr;
  at::Tensor packed_;  // uint8 [ranks * packed_bytes] while a gather runs
  std::vector<Work> works_;
  StreamEvent gathered_;
  std::unique_ptr<GradientReduction> reduction_;
  std::vector<at::Tensor>
      partial_;  // HSDP: sums, by buffer, that wait for a backward with all-reduce
};

}  // namespace megashard
