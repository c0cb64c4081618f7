// The backward side of FsdpState.

#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "parallel/fsdp/fsdp_state.h"

namespace megashard {

void FsdpState::pre_backward() {
  queue_final_callback();
  if (phase_ == Phase::kPreBackward) return;
  phase_ = Phase::kPreBackward;
  if (groups_.empty()) return;
  context_->note("pre_backward", name_);
  for (const auto& group : groups_) {
    if (group->unshard_in_backward) group->gather();
  }
  for (const auto& group : groups_) {
    if (group->unshard_in_backward) {
      group->wait(/*in_forward=*/false);
    } else {
      group->show_shapes();  // autograd lays gradients out like their parameters
    }
    group->stash_gradients();
  }
  prefetch_backward();
}

void FsdpState::prefetch_backward() {
  if (!backward_prefetch.empty()) return prefetch(backward_prefetch);
  if (post_forward_indices_.empty()) return;
  const size_t index = post_forward_indices_.back();
  post_forward_indices_.pop_back();
  if (index == 0 || index > context_->post_forward_order.size()) return;
  for (const auto& group : context_->post_forward_order[index - 1]->groups_) {
    if (group->unshard_in_backward) group->gather();
  }
}

void FsdpState::post_backward() {
  phase_ = Phase::kPostBackward;
  if (groups_.empty()) return;
  context_->note("post_backward", name_);
  for (const auto& group : groups_) {
    if (group->reshard_after_backward || group->state() == FsdpGroup::State::kShapeOnly)
      group->release();
  }
  CommContext& comm = *context_->comm;
  const size_t most = std::max(comm.max_reducing, groups_.size());  // a unit's own may overlap
  while (comm.reducing.size() + groups_.size() > most) comm.reducing.front()->finish_reduce();
  for (const auto& group : groups_) {
    if (group->reduce_gradients) {
      group->start_reduce();
    } else {
      group->accumulate_gradients();
    }
  }
}

/// Ends backward, or, if the engine drops it because backward threw, undoes what backward left half
/// done.
struct FsdpState::BackwardEnd {
  std::shared_ptr<FsdpContext> context;
  bool done = false;
  explicit BackwardEnd(std::shared_ptr<FsdpContext> shared) : context(std::move(shared)) {}
  ~BackwardEnd() {
    if (!done) abandon_backward(*context);
  }
};

void FsdpState::queue_final_callback() {
  if (context_->backward_running) return;
  context_->backward_running = true;
  auto end = std::make_shared<BackwardEnd>(context_);
  torch::autograd::Engine::get_default_engine().queue_callback([end] {
    finish_backward(*end->context);
    end->done = true;
  });
}

void FsdpState::finish_backward(FsdpContext& context) {
  for (auto* state : context.states) {
    const auto& groups = state->groups_;
    const bool owes = std::any_of(groups.begin(), groups.end(),
                                  [](const auto& group) { return group->owes_reduction(); });
    if (state->phase_ == Phase::kPreBackward || (state->phase_ == Phase::kIdle && owes))
      state->post_backward();
  }
  for (auto* state : context.states) state->phase_ = Phase::kIdle;
  if (context.is_last_backward) {
    CommContext& comm = *context.comm;
    while (!comm.reducing.empty()) comm.reducing.front()->finish_reduce();
    if (comm.all_reducing != nullptr) comm.all_reducing->finish_all_reduce();
    comm.drop_held_reduction();
    comm.wait_for_reductions();
    for (auto* state : context.states) {
      state->post_forward_indices_.clear();
      for (const auto& group : state->groups_) {
        // Prefetched for nothing, or gathered by an evaluation that ran inside this backward.
        if (group->reshard_after_backward && !state->started_) group->release();
        group->wait_for_host_memory();
      }
    }
    context.post_forward_order.clear();
  }
  context.backward_running = false;
}

void FsdpState::abandon_backward(FsdpContext& context) noexcept {
  for (auto* state : context.states) {
    for (const auto& group : state->groups_) group->abandon_backward();
    state->phase_ = Phase::kIdle;
    state->post_forward_indices_.clear();
  }
  context.post_forward_order.clear();
  context.comm->drop_held_gather();
  context.backward_running = false;
}

}  // namespace megashard
