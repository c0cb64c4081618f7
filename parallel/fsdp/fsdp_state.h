#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "parallel/fsdp/fsdp_context.h"
#include "parallel/fsdp/fsdp_group.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// What one fully_shard call made of its module, or of its list of modules: its groups, one for
/// each mesh, and when they are gathered, freed and reduced (FSDPState). Owned by the modules'
/// hooks and by the autograd nodes of graphs that are alive.
class FsdpState : public std::enable_shared_from_this<FsdpState> {
 public:
  FsdpState(std::vector<torch::nn::Module*> modules, const FullyShardOptions& options);
  ~FsdpState();

  /// None for a module without parameters of its own; several where parameters have other meshes.
  const std::vector<std::unique_ptr<FsdpGroup>>& groups() const { return groups_; }
  void add_group(std::unique_ptr<FsdpGroup> group) { groups_.push_back(std::move(group)); }
  FsdpContext* context() { return context_.get(); }
  const std::string& name() const { return name_; }

  // Forward, for the module at `index` of the list. A list runs as one: from the first module to
  // the last.
  void pre_forward(TensorRefs inputs);
  void post_forward(size_t index, TensorRefs outputs);
  void forward_failed() noexcept;

  void start_unshard();
  void finish_unshard();  ///< if start_unshard's gather still runs
  void reshard_now();
  c10::Device device() const { return mesh_device_; }
  void share_comm(std::shared_ptr<CommContext> comm);  ///< of a root that has not run yet
  /// If no root was found yet, this state's module is it: names everything from there and shares
  /// one context.
  void ensure_root();

  std::vector<std::weak_ptr<FsdpState>> forward_prefetch;
  std::vector<std::weak_ptr<FsdpState>> backward_prefetch;  ///< empty: reverse order of forward

 private:
  enum class Phase { kIdle, kForward, kPreBackward, kPostBackward };
  struct WatchedInput {
    at::Tensor tensor;
    int64_t version;
  };
  struct BackwardEnd;

  void name_parameters(const torch::nn::Module& root);
  bool all_ran() const;
  void start_forward(TensorRefs inputs);
  void finish_forward();
  void begin_iteration();
  void end_iteration();
  static void restore_outside_forward(FsdpContext& context);
  void give_up_forward(bool parameters_too) noexcept;
  void prefetch(const std::vector<std::weak_ptr<FsdpState>>& targets);
  void gather();
  void move_to_device(TensorRefs tensors) const;
  void cast_floating(TensorRefs tensors, at::ScalarType dtype) const;
  void check_outputs(TensorRefs outputs) const;
  void pre_backward();
  void prefetch_backward();
  void post_backward();
  void queue_final_callback();
  static void finish_backward(FsdpContext& context);
  static void abandon_backward(FsdpContext& context) noexcept;

  std::vector<torch::nn::Module*> modules_;
  MixedPrecisionPolicy policy_;
  c10::Device mesh_device_;
  std::vector<std::unique_ptr<FsdpGroup>> groups_;
  std::shared_ptr<CommContext> comm_;  // of a root
  std::shared_ptr<FsdpContext> context_;
  bool provisional_ =
      false;  // the context is this state's own: gathered by hand before the root ran
  std::string name_;
  Phase phase_ = Phase::kIdle;
  std::vector<bool> ran_;  // modules of the list that ran since the group was gathered; all: idle
  bool started_ = false;   // a forward, not a recompute, is under way
  int64_t repeated_ = 0;   // ForwardToRepeat::count() when it began
  std::vector<WatchedInput> inputs_;          // to notice in-place changes
  std::vector<size_t> post_forward_indices_;  // in the context's post_forward_order
};

}  // namespace megashard
