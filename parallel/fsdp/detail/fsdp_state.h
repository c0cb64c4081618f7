#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parallel/fsdp/detail/fsdp_context.h"
#include "parallel/fsdp/detail/fsdp_param_group.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Replaces the tensors that require grad by aliases whose gradients pass unchanged through one autograd node. The node
/// calls `callback` once all gradients that backward needs of them have arrived. Unlike an autograd::Function, it
/// allows in-place changes of views, and unlike a tensor hook, it fires for them. Returns true if any tensor required
/// grad. Needs grad mode.
bool pass_through_node(const char* node_name, TensorRefs tensors, std::function<void()> callback);

/// State of one fully_shard call on a module or list of modules: its groups, one per mesh, and when they are unsharded,
/// resharded and reduced (FSDPState). Owned by the modules' hooks and by the autograd nodes of live graphs.
class FsdpState : public std::enable_shared_from_this<FsdpState> {
 public:
  /// `policy`: casts of inputs and outputs.
  FsdpState(std::vector<torch::nn::Module*> modules, const MixedPrecisionPolicy& policy, c10::Device device);
  void register_hooks();  ///< on its modules, which then own this state
  ~FsdpState();
  FsdpState(const FsdpState&) = delete;
  FsdpState& operator=(const FsdpState&) = delete;

  /// Empty for a module without parameters of its own; several for several meshes, or if a plan mixes dtypes.
  const std::vector<std::unique_ptr<FsdpParamGroup>>& groups() const { return groups_; }
  void add_group(std::unique_ptr<FsdpParamGroup> group);
  const std::vector<torch::nn::Module*>& modules() const { return modules_; }
  const MixedPrecisionPolicy& policy() const { return policy_; }
  bool casts() const { return policy_.output_dtype || (policy_.cast_forward_inputs && policy_.param_dtype); }
  /// Call between steps; leaves no group until others are added.
  std::vector<std::unique_ptr<FsdpParamGroup>> take_groups() { return std::exchange(groups_, {}); }
  void adopt_units();  ///< adopts changed units under a root that has run
  FsdpContext* context() { return context_.get(); }
  /// Returns the root's context. Before the root's first forward, which determines the root, returns this unit's own;
  /// the root's adopts its settings later (PyTorch drops them).
  FsdpContext& ensure_context();
  /// Null before the root's first forward. Throws, with the name of the control, for a unit that is not the root.
  FsdpContext* context_of_root(const char* control) const;
  const std::string& name() const { return name_; }
  c10::Device device() const { return mesh_device_; }
  bool forward_running() const { return forward_running_; }  ///< a forward, not a recompute
  void share_comm(std::shared_ptr<CommContext> comm);        ///< for a root that has not run yet

  // Forward of the module at `index` of the list. A list forms one unit: unsharded before the first module, resharded
  // after the last.
  void pre_forward(TensorRefs inputs);
  void post_forward(size_t index, TensorRefs outputs);
  void forward_failed() noexcept;

  // Explicit unshard and reshard.
  void start_unshard();
  void wait_for_unshard();  ///< if start_unshard's all-gather still runs
  void reshard();

  std::vector<std::weak_ptr<FsdpState>> forward_prefetch;
  std::vector<std::weak_ptr<FsdpState>> backward_prefetch;  ///< empty: reverse order of forward

  // Called by the context at the end of iterations and backwards.
  void finish_partial_forward();                       ///< for a list of which only some modules ran
  void abandon_forward(bool parameters_too) noexcept;  ///< forward threw
  /// For a unit whose inputs no gradient reached, or with a reduction due, which is left for later unless `reduces`.
  void finish_missed_backward(bool reduces);
  void end_backward() noexcept { training_state_ = TrainingState::kIdle; }
  void forget_post_forward_order() noexcept { post_forward_indices_.clear(); }

 private:
  enum class TrainingState { kIdle, kForward, kPreBackward, kPostBackward };
  struct WatchedInput {
    at::Tensor tensor;
    int64_t version;
  };

  /// Makes this state's module the root if there is none yet: names all units and lets them share one context.
  void lazy_init();
  void adopt_units(const std::shared_ptr<FsdpContext>& context);
  void name_group(size_t index);
  void name_parameters(const torch::nn::Module& root);
  bool all_ran() const;
  void start_forward(TensorRefs inputs);
  bool is_sharded() const;
  void tell_clock(UnitMoment moment);
  void finish_forward();
  void unshard(bool in_backward = false);
  void move_to_device(TensorRefs tensors) const;
  void check_outputs(TensorRefs outputs) const;
  void pre_backward();
  void prefetch_backward();
  void post_backward(bool may_reduce = true);

  std::vector<torch::nn::Module*> modules_;
  MixedPrecisionPolicy policy_;
  c10::Device mesh_device_;
  std::shared_ptr<CommContext> comm_;  // of a root
  std::shared_ptr<FsdpContext> context_;
  bool provisional_ = false;  // ensure_context created the context
  std::vector<std::unique_ptr<FsdpParamGroup>> groups_;
  std::string name_;
  TrainingState training_state_ = TrainingState::kIdle;
  std::vector<bool> ran_;  // modules of the list that ran since the group was unsharded; all: idle
  bool forward_running_ = false;
  int64_t repeated_ = 0;                      // ForwardToRepeat::count() at the start of forward
  std::vector<WatchedInput> inputs_;          // to detect in-place changes
  std::vector<size_t> post_forward_indices_;  // in the context's post_forward_order
};

/// State of a module under fully_shard; null for others.
std::shared_ptr<FsdpState> fsdp_state(const torch::nn::Module& module);

}  // namespace megashard
