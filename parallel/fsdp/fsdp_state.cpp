#include "parallel/fsdp/fsdp_state.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "parallel/collectives/guard_key.h"
#include "parallel/copies/on_device.h"
#include "parallel/fsdp/backward_scope.h"
#include "parallel/fsdp/unit_nodes.h"

namespace megashard {
namespace {

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

FsdpState::FsdpState(std::vector<torch::nn::Module*> modules, const FullyShardOptions& options)
    : modules_(std::move(modules)),
      policy_(options.mixed_precision),
      mesh_device_(options.mesh->device()),
      name_(dynamic_cast<const HookedModule&>(*modules_[0]).class_name()),
      ran_(modules_.size(), true) {}

FsdpState::~FsdpState() = default;

void FsdpState::ensure_root() {
  if (context_ != nullptr && !provisional_) return;
  TORCH_CHECK(modules_.size() == 1, "the root of fully_shard must be one module: call fully_shard on the whole model "
              "last, or run forward through it");
  torch::nn::Module& root = *modules_[0];
  if (comm_ == nullptr) comm_ = std::make_shared<CommContext>(mesh_device_);
  auto context = std::make_shared<FsdpContext>(comm_);
  std::unordered_set<const FsdpState*> seen;
  auto adopt = [&](const std::string& path, const torch::nn::Module& module) {
    const auto state = fsdp_state(module);
    if (state == nullptr || !seen.insert(state.get()).second) return;
    TORCH_CHECK(state->context_ == nullptr || state->provisional_, "module '", path, "' ran forward on its own before its root did: run "
                "forward through the root module first");
    state->name_ = path;
    context->states.push_back(state.get());
  };
  adopt(name_, root);
  for (const auto& item : root.named_modules("", /*include_self=*/false))
    adopt(item.key(), *item.value());
  for (auto* state : context->states) {
    state->context_ = context;
    if (!std::exchange(state->provisional_, false)) continue;
    for (const auto& group : state->groups_) group->prepare(*context);
  }
  name_parameters(root);
  for (const auto& group : groups_) group->set_of_root();
}

void FsdpState::name_parameters(const torch::nn::Module& root) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : root.named_parameters())
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  for (auto* state : context_->states) {
    for (size_t i = 0; i < state->groups_.size(); ++i) {
      FsdpGroup& group = *state->groups_[i];
      group.set_name(i == 0 ? state->name_ : c10::str(state->name_, "#", i));
      for (const auto& param : group.params()) {
        const auto found = names.find(param->parameter().unsafeGetTensorImpl());
        if (found != names.end()) param->set_name(found->second);
      }
    }
  }
}

bool FsdpState::all_ran() const {
  return std::all_of(ran_.begin(), ran_.end(), [](bool ran) { return ran; });
}

void FsdpState::pre_forward(TensorRefs inputs) {
  enter_guarded_forward();  // before all that may throw: forward_failed leaves it
  ensure_root();
  if (!inside_backward() && context_->forward_depth++ == 0) {
    begin_iteration();
    move_to_device(inputs);
  }
  if (policy_.cast_forward_inputs && policy_.param_dtype)
    cast_floating(inputs, *policy_.param_dtype);
  if (all_ran()) start_forward(inputs);
}

void FsdpState::start_forward(TensorRefs inputs) {
  ran_.assign(modules_.size(), false);
  const bool recompute = inside_backward();
  if (!recompute) phase_ = Phase::kForward;
  started_ = !recompute;
  repeated_ = ForwardToRepeat::count();
  if (auto* scope = RecomputeScope::current(); scope != nullptr && !context_->backward_running) {
    // A reentrant recompute around the root: the end of the outer backward is the one to wait for.
    scope->before_inner_backward([self = shared_from_this()] { self->queue_final_callback(); });
  }
  for (const auto& group : groups_) group->release_incomplete();
  gather();
  for (const auto& group : groups_) group->wait(/*in_forward=*/!recompute);
  if (!recompute) prefetch(forward_prefetch);
  if (!c10::GradMode::is_enabled()) return;
  inputs_.clear();
  for (const auto* input : inputs) {
    if (input->defined() && input->requires_grad()) inputs_.push_back({*input, input->_version()});
  }
  if (!groups_.empty()) {
    pass_through_node("FsdpPostBackward", inputs,
                      [self = shared_from_this()] { self->post_backward(); });
  }
}

void FsdpState::begin_iteration() {
  const CommStreams& streams = context_->streams();
  auto given = std::exchange(context_->post_optim_event, std::nullopt);
  if (streams.enabled()) {  // the optimizer's writes come before packing, and so before gathers
    const StreamEvent written = given ? std::move(*given) : StreamEvent::record(streams.current());
    written.make_wait(*streams.copy_in);
  }
  for (auto* state : context_->states) {  // weights may have changed since slices were kept
    for (const auto& group : state->groups_) {
      if (group->state() == FsdpGroup::State::kPostForward) group->release();
    }
  }
  // Autocast would keep casts of gathered weights beyond their release.
  context_->autocast_cache = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_cache_enabled(false);
}

void FsdpState::restore_outside_forward(FsdpContext& context) {
  at::autocast::set_autocast_cache_enabled(context.autocast_cache);
  context.comm->drop_held_gather();
}

void FsdpState::end_iteration() {
  for (auto* state : context_->states) {  // lists of which only some modules ran
    if (!state->all_ran()) state->finish_forward();
  }
  restore_outside_forward(*context_);
}

void FsdpState::prefetch(const std::vector<std::weak_ptr<FsdpState>>& targets) {
  for (const auto& target : targets) {
    const auto state = target.lock();
    if (state != nullptr) state->gather();
  }
}

void FsdpState::gather() {
  for (const auto& group : groups_) {
    group->prepare(*context_);
    group->gather();
  }
}

void FsdpState::post_forward(size_t index, TensorRefs outputs) {
  check_outputs(outputs);
  ran_[index] = true;
  if (all_ran()) finish_forward();
  if (c10::GradMode::is_enabled()) {
    pass_through_node("FsdpPreBackward", outputs,
                      [self = shared_from_this()] { self->pre_backward(); });
  }
  if (policy_.output_dtype) cast_floating(outputs, *policy_.output_dtype);
  if (!inside_backward()) {
    if (context_->forward_depth == 1) end_iteration();
    --context_->forward_depth;  // after all that may throw: forward_failed does it then
  }
  leave_guarded_forward();
}

void FsdpState::finish_forward() {
  ran_.assign(modules_.size(), true);
  for (const auto& input : std::exchange(inputs_, {})) {
    TORCH_CHECK(input.tensor._version() == input.version, "an input of '", name_, "' was changed in place inside its "
                "forward, which its caller's graph cannot see: clone the input first");
  }
  if (repeated_ != ForwardToRepeat::count()) {
    // A part of it runs again in a backward of its own, which this unit's cannot see coming.
    for (const auto& group : groups_) group->releases_one_by_one = false;
  }
  if (!started_) return;  // a recompute: backward still needs the parameters
  started_ = false;
  phase_ = Phase::kIdle;
  if (groups_.empty()) return;
  for (const auto& group : groups_) group->release_after_forward();
  if (backward_may_follow()) {
    post_forward_indices_.push_back(context_->post_forward_order.size());
    context_->post_forward_order.push_back(this);
  }
}

void FsdpState::forward_failed() noexcept {
  leave_guarded_forward();
  if (context_ == nullptr || inside_backward()) {
    give_up_forward(/*parameters_too=*/false);  // a recompute may stop early: backward needs them
    return;
  }
  give_up_forward(/*parameters_too=*/true);
  if (--context_->forward_depth > 0) return;
  restore_outside_forward(*context_);
  context_->post_forward_order.clear();
  for (auto* state : context_->states) {
    state->give_up_forward(/*parameters_too=*/true);
    state->post_forward_indices_.clear();
  }
}

void FsdpState::give_up_forward(bool parameters_too) noexcept {
  inputs_.clear();
  ran_.assign(modules_.size(), true);
  if (!parameters_too) return;
  started_ = false;
  phase_ = Phase::kIdle;
  try {
    for (const auto& group : groups_) group->release();
  } catch (const std::exception&) {
    // The exception that left forward is the one to report.
  }
}

/// The root's inputs, which a loader may have left in host memory.
void FsdpState::move_to_device(TensorRefs tensors) const {
  if (mesh_device_.is_cpu()) return;
  for (auto* tensor : tensors) {
    if (!tensor->defined() || tensor->device() == mesh_device_) continue;
    // Autograd knows no way through pinned memory.
    *tensor = tensor->requires_grad() ? tensor->to(mesh_device_) : on_device(*tensor, mesh_device_);
  }
}

void FsdpState::cast_floating(TensorRefs tensors, at::ScalarType dtype) const {
  for (auto* tensor : tensors) {
    if (tensor->defined() && tensor->is_floating_point() && tensor->scalar_type() != dtype)
      *tensor = tensor->to(dtype);
  }
}

void FsdpState::check_outputs(TensorRefs outputs) const {
  TORCH_CHECK(!outputs.empty() || groups_.empty() || !c10::GradMode::is_enabled(), "'", name_, "' returns no tensors "
              "that fully_shard can see, so its backward would go unnoticed: give the returned struct a visit_tensors "
              "member (parallel/fsdp/tensor_visitor.h)");
  for (const auto* output : outputs) {
    if (!output->defined() || !output->has_storage()) continue;
    const auto* storage = output->storage().unsafeGetStorageImpl();
    const bool own = std::any_of(groups_.begin(), groups_.end(),
                                 [=](const auto& group) { return group->owns_full(storage); });
    TORCH_CHECK(!own && find_fsdp_param(*output) == nullptr, "'", name_, "' returns a parameter or a view of it, which "
                "is freed after forward: return a clone, or use the parameter inside");
  }
}

void FsdpState::start_unshard() {
  if (context_ == nullptr) {  // which module is the root, only its forward tells
    if (comm_ == nullptr) comm_ = std::make_shared<CommContext>(mesh_device_);
    context_ = std::make_shared<FsdpContext>(comm_);
    context_->states.push_back(this);
    provisional_ = true;
  }
  const CommStreams& streams = context_->streams();
  if (streams.enabled()) order_streams(streams.current(), *streams.copy_in);
  for (const auto& group : groups_) group->release_incomplete();
  gather();
}

void FsdpState::finish_unshard() {
  for (const auto& group : groups_) {
    if (group->state() == FsdpGroup::State::kGathering) group->wait(/*in_forward=*/false);
  }
}

void FsdpState::reshard_now() {
  if (context_ == nullptr) return;
  for (const auto& group : groups_) group->release();
}

void FsdpState::share_comm(std::shared_ptr<CommContext> comm) {
  TORCH_CHECK(context_ == nullptr, "'", name_, "' has run already: call share_comm_context before the first forward");
  comm_ = std::move(comm);
}

}  // namespace megashard
