#include "parallel/fsdp/detail/fsdp_context.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "parallel/device/device_plan.h"
#include "parallel/fsdp/detail/fsdp_param.h"
#include "parallel/fsdp/detail/fsdp_param_group.h"
#include "parallel/fsdp/detail/fsdp_state.h"

namespace megashard {

CommStreams::CommStreams(c10::Device target) : device(target) {
  if (acts_as_cpu(device)) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  copy_in = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  all_gather = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  reduce_scatter = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  all_reduce = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
}

void CommContext::forget(const FsdpParamGroup* group) {
  std::erase(reducing, group);
  std::erase(all_reducing, group);
}

void CommContext::hold_gather(at::Tensor buffer) {
  drop_held_gather();
  held_gather_ = std::move(buffer);
  copied_out_ = StreamEvent::record(streams.current());
}

void CommContext::drop_held_gather() {
  if (!held_gather_.defined()) return;
  copied_out_.make_wait(*streams.copy_in);
  held_gather_ = at::Tensor();
}

void CommContext::hold_reduction(std::unique_ptr<Reduction> reduction) {
  held_reduction_ = std::move(reduction);
  held_reduction_read_ = StreamEvent::record(streams.current());
}

void CommContext::drop_held_reduction() {
  if (held_reduction_ == nullptr) return;
  held_reduction_read_.make_wait(*streams.reduce_scatter);
  held_reduction_ = nullptr;
}

void CommContext::reduces_on(const c10::Stream& stream) {
  if (std::find(reducing_streams_.begin(), reducing_streams_.end(), stream) == reducing_streams_.end())
    reducing_streams_.push_back(stream);
}

void CommContext::wait_for_reductions() {
  if (reducing_streams_.empty()) return;
  const c10::Stream current = streams.current();
  for (const auto& stream : reducing_streams_) {
    if (stream != current) order_streams(stream, current);
  }
  reducing_streams_.clear();
}

namespace {

/// Orders later reads and frees of gradients after the reductions, complete or abandoned.
void end_reductions(CommContext& comm) {
  comm.drop_held_reduction();
  comm.wait_for_reductions();
}

}  // namespace

void CommContext::check_finalized(const char* before) const {
  TORCH_CHECK(finalizing == nullptr,
              "the gradients of finalize_backward(async_op=true) have not been waited for: call "
              "wait() of its handle before ",
              before);
}

void FsdpContext::begin_iteration() {
  comm->check_finalized("the next forward");
  auto given = std::exchange(post_optim_event, std::nullopt);
  if (streams().enabled()) {  // order the optimizer's writes before packing, and so before all-gathers
    const StreamEvent written = given ? std::move(*given) : StreamEvent::record(streams().current());
    written.make_wait(*streams().copy_in);
  }
  for (auto* state : states) {  // weights may have changed since slices were kept
    for (const auto& group : state->groups()) {
      if (group->sharded_state() == ShardedState::kShardedPostForward) group->reshard();
    }
  }
  // Autocast would cache casts of unsharded weights beyond their resharding.
  autocast_cache_ = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_cache_enabled(false);
}

void FsdpContext::end_iteration() {
  for (auto* state : states) state->finish_partial_forward();
  restore_outside_forward();
}

void FsdpContext::abandon_iteration() {
  restore_outside_forward();
  post_forward_order.clear();
  for (auto* state : states) {
    state->abandon_forward(/*parameters_too=*/true);
    state->forget_post_forward_order();
  }
}

void FsdpContext::restore_outside_forward() {
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
  comm->drop_held_gather();
}

/// Ends backward; if the engine drops it because backward threw, cleans up instead.
struct FsdpContext::BackwardEnd {
  std::shared_ptr<FsdpContext> context;
  bool done = false;
  explicit BackwardEnd(std::shared_ptr<FsdpContext> shared) : context(std::move(shared)) {}
  ~BackwardEnd() {
    if (!done) context->abandon_backward();
  }
};

void FsdpContext::queue_final_callback() {
  if (backward_running) return;
  backward_running = true;
  auto end = std::make_shared<BackwardEnd>(shared_from_this());
  torch::autograd::Engine::get_default_engine().queue_callback([end] {
    end->context->finish_backward();
    end->done = true;
  });
}

void FsdpContext::finish_backward() {
  for (auto* state : states) state->finish_missed_backward(/*reduces=*/!manual_finalization);
  for (auto* state : states) state->end_backward();
  if (manual_finalization) {
    finalization_due_ = true;
  } else if (is_last_backward) {
    wait_for_gradients();
  }
  backward_running = false;
}

void FsdpContext::wait_for_gradients() {
  while (!comm->reducing.empty()) comm->reducing.front()->wait_for_reduce_scatter();
  while (!comm->all_reducing.empty()) comm->all_reducing.front()->wait_for_all_reduce();
  end_reductions(*comm);
  for (auto* state : states) {
    state->forget_post_forward_order();
    for (const auto& group : state->groups()) {
      // Prefetched but unused, or unsharded by an evaluation inside this backward.
      if (group->reshards_after_backward() && !state->forward_running()) group->reshard();
      group->wait_for_host_memory();
    }
  }
  post_forward_order.clear();
}

void FsdpContext::set_manual_finalization(bool manual) {
  TORCH_CHECK(manual == manual_finalization || (!backward_running && !finalization_due_),
              "set_manual_backward_finalization cannot change between a backward and its finalize_backward: call that, "
              "or reset_iter_state, first");
  manual_finalization = manual;
}

/// True if a root that shares the comm context has reductions in flight or a backward to come.
bool FsdpContext::another_root_works() const {
  return std::ranges::any_of(comm->roots, [this](const FsdpContext* root) {
    return root != this && !root->post_forward_order.empty();  // empty after the end of a backward that waits
  });
}

GradientReductionHandle FsdpContext::finalize_backward(bool async_op) {
  comm->check_finalized("the next finalize_backward");
  TORCH_CHECK(manual_finalization, "finalize_backward needs set_manual_backward_finalization(root, true) before "
                                   "the step's forward: without it each backward ends by itself");
  TORCH_CHECK(idle(), "finalize_backward was called inside a forward or backward: call it after the step's backwards");
  TORCH_CHECK(!async_op || !another_root_works(),
              "finalize_backward(async_op=true) cannot overlap the work of another root, which shares the comm "
              "context: finish that root's backward first, or leave out async_op");
  for (auto* state : states) state->finish_missed_backward(/*reduces=*/true);
  for (auto* state : states) state->end_backward();
  finalization_due_ = false;
  if (!async_op) {
    wait_for_gradients();
    return GradientReductionHandle();
  }
  comm->finalizing = this;
  return GradientReductionHandle([self = shared_from_this(), number = ++comm->finalization] {
    TORCH_CHECK(self->comm->finalizing == self.get() && self->comm->finalization == number,
                "reset_iter_state discarded these gradients: start again with a forward");
    self->comm->finalizing = nullptr;
    self->wait_for_gradients();
  });
}

void FsdpContext::reset_iteration() {
  TORCH_CHECK(comm->finalizing == nullptr || comm->finalizing == this,
              "another root, which shares the comm context, has not waited for its gradients: call wait() of its "
              "handle before reset_iter_state");
  comm->finalizing = nullptr;
  finalization_due_ = false;
  forward_depth = 0;
  abandon_iteration();
  abandon_backward();
  for (auto* state : states) {
    for (const auto& group : state->groups()) group->clear_pending_grads();
  }
}

void FsdpContext::abandon_backward() noexcept {
  for (auto* state : states) {
    for (const auto& group : state->groups()) group->abandon_backward();
    state->end_backward();
    state->forget_post_forward_order();
  }
  post_forward_order.clear();
  comm->drop_held_gather();
  end_reductions(*comm);
  backward_running = false;
}

void FsdpContext::take_settings(FsdpContext& of_unit) {
  comm->max_reducing = std::max(comm->max_reducing, of_unit.comm->max_reducing);
  is_last_backward &= of_unit.is_last_backward;
  manual_finalization |= of_unit.manual_finalization;
  if (!post_optim_event) post_optim_event = std::exchange(of_unit.post_optim_event, std::nullopt);
  if (!observer) observer = std::move(of_unit.observer);
  if (trail == nullptr) trail = std::move(of_unit.trail);
}

void FsdpContext::forget(const FsdpState* state) {
  std::erase(states, state);
  std::replace(post_forward_order.begin(), post_forward_order.end(), const_cast<FsdpState*>(state),
               static_cast<FsdpState*>(nullptr));
}

void FsdpState::name_group(size_t index) { groups_[index]->set_name(index == 0 ? name_ : c10::str(name_, "#", index)); }

FsdpContext& FsdpState::ensure_context() {
  if (context_ == nullptr) {
    if (comm_ == nullptr) comm_ = std::make_shared<CommContext>(mesh_device_);
    context_ = std::make_shared<FsdpContext>(comm_);
    context_->states.push_back(this);
    provisional_ = true;
    // New streams; no root's forward has ordered them after the weights' writes.
    const CommStreams& streams = context_->streams();
    if (streams.enabled()) order_streams(streams.current(), *streams.copy_in);
  }
  return *context_;
}

FsdpContext* FsdpState::context_of_root(const char* control) const {
  if (context_ == nullptr || provisional_) return nullptr;
  TORCH_CHECK(context_->states.front() == this, control, " was called on '", name_,
              "', which is not the root: call it on the module that runs forward first");
  return context_.get();
}

void FsdpState::lazy_init() {
  if (context_ != nullptr && !provisional_) return;
  TORCH_CHECK(modules_.size() == 1, "the root of fully_shard must be one module: call fully_shard on the whole model "
                                    "last, or run forward through it");
  if (comm_ == nullptr) comm_ = std::make_shared<CommContext>(mesh_device_);
  adopt_units(std::make_shared<FsdpContext>(comm_));
}

void FsdpState::adopt_units() {
  if (context_ == nullptr || provisional_) return;
  context_->states.clear();
  context_->post_forward_order.clear();
  adopt_units(context_);
}

void FsdpState::adopt_units(const std::shared_ptr<FsdpContext>& context) {
  torch::nn::Module& root = *modules_[0];
  std::unordered_set<const FsdpState*> seen;
  auto adopt = [&](const std::string& path, const torch::nn::Module& module) {
    const auto state = fsdp_state(module);
    if (state == nullptr || !seen.insert(state.get()).second) return;
    const bool belongs_elsewhere = state->context_ != nullptr && state->context_ != context && !state->provisional_;
    TORCH_CHECK(!belongs_elsewhere, "module '", path,
                "' ran forward on its own before its root did: run forward through the root module first");
    state->name_ = path;
    context->states.push_back(state.get());
  };
  adopt(name_, root);
  for (const auto& item : root.named_modules("", /*include_self=*/false)) adopt(item.key(), *item.value());
  for (const auto* state : context->states) {
    TORCH_CHECK(state == this || !state->provisional_ || !state->context_->manual_finalization,
                "set_manual_backward_finalization was called on '", state->name_,
                "', which is not the root: call it on "
                "the root");
  }
  for (auto* state : context->states) {
    if (std::exchange(state->provisional_, false)) context->take_settings(*state->context_);
    state->context_ = context;
    for (const auto& group : state->groups_) group->move_to(context);
  }
  name_parameters(root);
  for (const auto& group : groups_) group->set_of_root();
}

void FsdpState::name_parameters(const torch::nn::Module& root) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : root.named_parameters()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  for (auto* state : context_->states) {
    for (size_t i = 0; i < state->groups_.size(); ++i) {
      state->name_group(i);
      for (const auto& param : state->groups_[i]->params()) {
        const auto found = names.find(param->parameter().unsafeGetTensorImpl());
        if (found != names.end()) param->set_name(found->second);
      }
    }
  }
}

}  // namespace megashard
