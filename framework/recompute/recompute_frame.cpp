#include "framework/recompute/recompute_frame.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <utility>

#include "parallel/fsdp/recompute_scope.h"

namespace megashard::detail {
namespace {

constexpr int64_t kNoBackward = -1;

/// Ends a second run when no further tensors are needed.
struct EarlyStop : std::exception {
  const char* what() const noexcept override { return "recompute has all that backward needs"; }
};

}  // namespace

RepeatableCall::RepeatableCall(std::string module, std::shared_ptr<void> owner, ForwardRunner::Body body,
                               const std::vector<at::Tensor>& inputs, const RecomputeOptions& options)
    : module_(std::move(module)),
      owner_(std::move(owner)),
      body_(std::move(body)),
      state_(inputs, options.preserve_rng_state, options.generators) {
  for (const auto& input : inputs) {
    inputs_.emplace_back(input, /*is_output=*/false);
    defined_.push_back(input.defined());
  }
}

std::vector<at::Tensor> RepeatableCall::detached_inputs() const {
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const auto saved = defined_[i] ? inputs_[i].unpack() : at::Tensor();
    auto input = saved.defined() ? saved.detach() : saved;
    if (input.defined() && saved.requires_grad()) input.requires_grad_();
    inputs.push_back(std::move(input));
  }
  return inputs;
}

struct RecomputeFrame::Slot {
  Slot(std::shared_ptr<RecomputeFrame> owner, const at::Tensor& saved)
      : frame(std::move(owner)), sizes(saved.sizes().vec()), dtype(saved.scalar_type()) {}

  std::shared_ptr<RecomputeFrame> frame;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  at::Tensor value;  // from the second run until it is requested
  int64_t backward = kNoBackward;
};

class RecomputeFrame::Dropped final : public SavedTensorHook {
 public:
  explicit Dropped(std::shared_ptr<RecomputeFrame> frame) : frame_(std::move(frame)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    slot_ = std::make_shared<Slot>(std::move(frame_), tensor);
    slot_->frame->slots_.push_back(slot_);
  }
  at::Tensor call_unpack_hook() override { return slot_->frame->fetch(*slot_); }

 private:
  std::shared_ptr<RecomputeFrame> frame_;
  std::shared_ptr<Slot> slot_;
};

class RecomputeFrame::Recorder final : public SavedTensorProvider {
 public:
  Recorder(const RecomputeFrame& frame, int64_t backward) : backward_(backward), frame_(frame) {
    for (const auto& slot : frame.slots_) {
      slots_.push_back(slot.lock());
      if (slots_.back() != nullptr) needed_ = slots_.size();
    }
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;

  void take(const at::Tensor& tensor) {
    if (next_ >= slots_.size()) return;  // checked by finish(); cannot happen with early stop
    if (const auto& slot = slots_[next_]) {
      TORCH_CHECK(slot->sizes == tensor.sizes() && slot->dtype == tensor.scalar_type(), "recompute of ",
                  frame_.call_.module(), ": saved tensor ", next_, " was ", slot->dtype, c10::IntArrayRef(slot->sizes),
                  " in forward and is ", tensor.scalar_type(), tensor.sizes(),
                  " when computed again; its forward must do the same every time");
      slot->value = tensor.detach();
      slot->backward = backward_;
    }
    ++next_;
    if (frame_.early_stop_ && next_ == needed_) throw EarlyStop();
  }

  void finish() const {
    TORCH_CHECK(next_ >= needed_, "recompute of ", frame_.call_.module(), ": forward saved ", slots_.size(),
                " tensors for backward, and only ", next_,
                " when computed again; its forward must do the same every time");
  }

 private:
  int64_t backward_;
  const RecomputeFrame& frame_;
  std::vector<std::shared_ptr<Slot>> slots_;
  size_t needed_ = 0;  // number of slots up to the last one that the graph holds
  size_t next_ = 0;
};

/// Keeps tensors for the second run's own graph, in case its forward requests one.
class RecomputeFrame::Recorded final : public SavedTensorHook {
 public:
  explicit Recorded(Recorder& recorder) : recorder_(recorder) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    kept_ = tensor.detach();
    recorder_.take(tensor);
  }
  at::Tensor call_unpack_hook() override { return kept_; }

 private:
  Recorder& recorder_;  // valid during the second run
  at::Tensor kept_;
};

std::unique_ptr<torch::autograd::SavedVariableHooks> RecomputeFrame::Recorder::make_hooks() {
  return std::make_unique<Recorded>(*this);
}

std::unique_ptr<torch::autograd::SavedVariableHooks> RecomputeFrame::make_hooks() {
  return std::make_unique<Dropped>(shared_from_this());
}

at::Tensor RecomputeFrame::fetch(Slot& slot) {
  const int64_t backward = torch::autograd::get_current_graph_task_id();
  const std::lock_guard<std::mutex> lock(one_at_a_time_);
  if (!slot.value.defined() || slot.backward != backward) run_again(backward);
  // Moved out, so that it is freed once its node has run. A second backward recomputes it.
  return std::exchange(slot.value, at::Tensor());
}

void RecomputeFrame::run_again(int64_t backward) {
  Recorder recorder(*this, backward);
  const auto inputs = call_.detached_inputs();
  const CallState::Replayed replayed(call_.state());
  const RecomputeScope scope;
  const SavedTensorHooks hooks(&recorder);
  const KeptOutputs::Run kept(kept_.get(), KeptOutputs::Run::Kind::kAgain);
  try {
    call_.body()(inputs);
    recorder.finish();
    kept.finish();
  } catch (const EarlyStop&) {
  }
}

}  // namespace megashard::detail
