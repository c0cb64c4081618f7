#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "framework/recompute/call_state.h"
#include "framework/recompute/kept_outputs.h"
#include "framework/recompute/recompute.h"
#include "framework/recompute/saved_tensor_hooks.h"

namespace megashard::detail {

/// A forward that can be repeated: its body, its inputs as saved by autograd, and its state.
class RepeatableCall {
 public:
  /// `owner` keeps the module alive as long as its graph, like parameters in a plain graph.
  RepeatableCall(std::string module, std::shared_ptr<void> owner, ForwardRunner::Body body,
                 const std::vector<at::Tensor>& inputs, const RecomputeOptions& options);

  /// Detached inputs with their requires_grad. Throws if one was changed in place.
  std::vector<at::Tensor> detached_inputs() const;
  const ForwardRunner::Body& body() const { return body_; }
  const CallState& state() const { return state_; }
  const std::string& module() const { return module_; }

 private:
  std::string module_;
  std::shared_ptr<void> owner_;
  ForwardRunner::Body body_;
  // Saved under the hooks of an enclosing recompute, if any: then they are recomputed too.
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<bool> defined_;
  CallState state_;
};

/// One call of a module under non-reentrant recompute; provides every tensor that autograd saved in it. Kept alive by
/// the graph. Thread-safe for the threads of a backward.
class RecomputeFrame : public SavedTensorProvider, public std::enable_shared_from_this<RecomputeFrame> {
 public:
  /// `kept`: outputs of operators that run only in the first run; null: none.
  RecomputeFrame(RepeatableCall call, bool early_stop, std::unique_ptr<KeptOutputs> kept)
      : call_(std::move(call)), early_stop_(early_stop), kept_(std::move(kept)) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  KeptOutputs* kept() { return kept_.get(); }

 private:
  struct Slot;     // one saved tensor, by its position in the order of saving
  class Dropped;   // hooks of the first run: drop the tensor, fetch it from the frame in backward
  class Recorder;  // provider of the second run: fills slots by position
  class Recorded;  // hooks of Recorder

  at::Tensor fetch(Slot& slot);
  void run_again(int64_t backward);

  RepeatableCall call_;
  bool early_stop_;
  std::unique_ptr<KeptOutputs> kept_;
  std::vector<std::weak_ptr<Slot>> slots_;  // expired: not needed by the graph
  std::mutex one_at_a_time_;
};

}  // namespace megashard::detail
