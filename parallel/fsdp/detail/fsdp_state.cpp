#include "parallel/fsdp/detail/fsdp_state.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "parallel/copies/on_device.h"
#include "parallel/device/torch_versions.h"
#include "parallel/fsdp/detail/fsdp_param.h"
#include "parallel/fsdp/recompute_scope.h"
#include "parallel/guarded_tensor.h"

namespace megashard {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class UnitNode final : public Node {
 public:
  UnitNode(const char* node_name, torch::autograd::edge_list next, std::function<void()> callback)
      : Node(std::move(next)), name_(node_name), callback_(std::move(callback)) {}

  variable_list apply(variable_list&& gradients) override {
    callback_();
    return std::move(gradients);
  }
  std::string name() const override { return name_; }

 private:
  const char* name_;
  std::function<void()> callback_;
};

}  // namespace

bool pass_through_node(const char* node_name, TensorRefs tensors, std::function<void()> callback) {
  c10::SmallVector<at::Tensor*, 8> differentiable;
  torch::autograd::edge_list edges;
  for (auto* tensor : tensors) {
    if (!tensor->defined() || !tensor->requires_grad()) continue;
    differentiable.push_back(tensor);
    edges.push_back(torch::autograd::impl::gradient_edge(*tensor));
  }
  if (differentiable.empty()) return false;
  const auto node = make_node<UnitNode>(node_name, std::move(edges), std::move(callback));
  for (auto* tensor : differentiable) {
    at::Tensor alias = tensor->detach();
    torch::autograd::impl::set_gradient_edge(alias, {node, node->add_input_metadata(alias)});
    *tensor = std::move(alias);
  }
  return true;
}

namespace {

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

/// Connects one module of a fully_shard call to the call's state.
class ModuleHooks final : public ForwardHooks {
 public:
  ModuleHooks(std::shared_ptr<FsdpState> state, size_t index) : state_(std::move(state)), index_(index) {}
  void pre_forward(TensorRefs inputs) override { state_->pre_forward(inputs); }
  void post_forward(TensorRefs outputs) override { state_->post_forward(index_, outputs); }
  void forward_failed() noexcept override { state_->forward_failed(); }
  void before_conversion() override { state_->reshard(); }
  void before_rebind(const char* operation) override {
    TORCH_CHECK(false, "Module::", operation, " on module '", state_->name(),
                "', which is under fully_shard, would see local rows only. Save and load through save_checkpoint and "
                "load_checkpoint; build a second model instead of cloning");
  }
  const std::shared_ptr<FsdpState>& state() const { return state_; }

 private:
  std::shared_ptr<FsdpState> state_;
  size_t index_;
};

void cast_floating(TensorRefs tensors, at::ScalarType dtype) {
  for (auto* tensor : tensors) {
    if (tensor->defined() && tensor->is_floating_point() && tensor->scalar_type() != dtype) *tensor = tensor->to(dtype);
  }
}

}  // namespace

FsdpState::FsdpState(std::vector<torch::nn::Module*> modules, const MixedPrecisionPolicy& policy, c10::Device device)
    : modules_(std::move(modules)),
      policy_(policy),
      mesh_device_(device),
      name_(dynamic_cast<const HookedModule&>(*modules_[0]).class_name()),
      ran_(modules_.size(), true) {}

FsdpState::~FsdpState() {
  if (context_ != nullptr) context_->forget(this);
}

void FsdpState::register_hooks() {
  for (size_t i = 0; i < modules_.size(); ++i) {
    dynamic_cast<HookedModule&>(*modules_[i]).set_forward_hooks(std::make_shared<ModuleHooks>(shared_from_this(), i));
  }
}

void FsdpState::add_group(std::unique_ptr<FsdpParamGroup> group) {
  group->set_state(this);
  groups_.push_back(std::move(group));
  name_group(groups_.size() - 1);  // class name, until a root assigns a path
}

bool FsdpState::all_ran() const {
  return std::all_of(ran_.begin(), ran_.end(), [](bool ran) { return ran; });
}

void FsdpState::pre_forward(TensorRefs inputs) {
  enter_guarded_forward();  // before anything that may throw: forward_failed leaves it
  lazy_init();
  if (!inside_backward() && context_->forward_depth++ == 0) {
    context_->begin_iteration();
    move_to_device(inputs);
  }
  if (policy_.cast_forward_inputs && policy_.param_dtype) cast_floating(inputs, *policy_.param_dtype);
  if (all_ran()) start_forward(inputs);
}

void FsdpState::start_forward(TensorRefs inputs) {
  ran_.assign(modules_.size(), false);
  const bool recompute = inside_backward();
  if (!recompute) training_state_ = TrainingState::kForward;
  forward_running_ = !recompute;
  repeated_ = ForwardToRepeat::count();
  if (auto* scope = RecomputeScope::current(); scope != nullptr && !context_->backward_running) {
    // For a reentrant recompute around the root, the end of the outer backward matters.
    scope->before_inner_backward([context = context_] { context->queue_final_callback(); });
  }
  for (const auto& group : groups_) group->reshard_if_partial();
  const bool gathers = is_sharded();
  if (gathers) tell_clock(UnitMoment::kGather);
  unshard();
  for (const auto& group : groups_) group->wait_for_unshard(/*in_forward=*/!recompute);
  if (gathers) tell_clock(UnitMoment::kGathered);
  for (const auto& target : forward_prefetch) {
    const auto state = target.lock();
    if (!recompute && state != nullptr && !context_->clock) state->unshard();
  }
  if (!c10::GradMode::is_enabled()) return;
  inputs_.clear();
  for (const auto* input : inputs) {
    if (input->defined() && input->requires_grad()) inputs_.push_back({*input, input->_version()});
  }
  if (!groups_.empty()) {
    pass_through_node("FsdpPostBackward", inputs, [self = shared_from_this()] { self->post_backward(); });
  }
}

bool FsdpState::is_sharded() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const auto& group) { return group->sharded_state() != ShardedState::kUnsharded; });
}

void FsdpState::tell_clock(UnitMoment moment) {
  if (context_->clock) context_->clock(moment, *this);
}

void FsdpState::finish_partial_forward() {
  if (!all_ran()) finish_forward();
}

void FsdpState::unshard(bool in_backward) {
  ensure_context();  // a prefetch list or the user may name a unit of a root that has not run
  for (const auto& group : groups_) {
    if (in_backward && !group->unshard_in_backward) continue;
    group->lazy_init(context_);  // a listed unit may not have run yet
    group->unshard();
  }
}

void FsdpState::post_forward(size_t index, TensorRefs outputs) {
  check_outputs(outputs);
  ran_[index] = true;
  if (all_ran()) finish_forward();
  if (c10::GradMode::is_enabled()) {
    pass_through_node("FsdpPreBackward", outputs, [self = shared_from_this()] { self->pre_backward(); });
  }
  if (policy_.output_dtype) cast_floating(outputs, *policy_.output_dtype);
  if (!inside_backward()) {
    if (context_->forward_depth == 1) context_->end_iteration();
    --context_->forward_depth;  // after anything that may throw: forward_failed does it then
  }
  leave_guarded_forward();
}

void FsdpState::finish_forward() {
  ran_.assign(modules_.size(), true);
  for (const auto& input : std::exchange(inputs_, {})) {
    TORCH_CHECK(
        input.tensor._version() == input.version, "an input of '", name_,
        "' was changed in place inside its forward, which its caller's graph cannot see: clone the input first");
  }
  if (repeated_ != ForwardToRepeat::count()) {
    // A part of this unit is recomputed in its own backward, which this unit's backward does not see.
    for (const auto& group : groups_) group->reshards_one_by_one = false;
  }
  if (!forward_running_) return;  // a recompute: backward still needs the parameters
  forward_running_ = false;
  training_state_ = TrainingState::kIdle;
  if (groups_.empty()) return;
  for (const auto& group : groups_) group->post_forward();
  if (is_sharded()) tell_clock(UnitMoment::kResharded);
  if (backward_may_follow()) {
    post_forward_indices_.push_back(context_->post_forward_order.size());
    context_->post_forward_order.push_back(this);
  }
}

void FsdpState::forward_failed() noexcept {
  leave_guarded_forward();
  // A recompute may stop early: backward needs its parameters.
  const bool recompute = context_ == nullptr || inside_backward();
  abandon_forward(/*parameters_too=*/!recompute);
  if (!recompute && --context_->forward_depth == 0) context_->abandon_iteration();
}

void FsdpState::abandon_forward(bool parameters_too) noexcept {
  inputs_.clear();
  ran_.assign(modules_.size(), true);
  if (!parameters_too) return;
  forward_running_ = false;
  training_state_ = TrainingState::kIdle;
  try {
    for (const auto& group : groups_) group->reshard();
  } catch (const std::exception&) {
    // The exception that left forward is the one to report.
  }
}

void FsdpState::pre_backward() {
  context_->queue_final_callback();
  if (training_state_ == TrainingState::kPreBackward) return;
  training_state_ = TrainingState::kPreBackward;
  if (groups_.empty()) return;
  context_->note("pre_backward", name_);
  const bool gathers = is_sharded();
  if (gathers) tell_clock(UnitMoment::kGather);
  unshard(/*in_backward=*/true);
  for (const auto& group : groups_) {
    if (group->unshard_in_backward) {
      group->wait_for_unshard(/*in_forward=*/false);
    } else {
      group->show_unsharded_sizes();  // autograd allocates gradients with their parameters' layout
    }
    group->set_aside_sharded_grads();
  }
  if (gathers) tell_clock(UnitMoment::kGathered);
  if (!context_->clock) prefetch_backward();
}

void FsdpState::prefetch_backward() {
  for (const auto& target : backward_prefetch) {
    const auto state = target.lock();
    if (state != nullptr) state->unshard(/*in_backward=*/true);
  }
  if (!backward_prefetch.empty()) return;
  if (post_forward_indices_.empty()) return;
  const size_t index = post_forward_indices_.back();
  post_forward_indices_.pop_back();
  if (index == 0 || index > context_->post_forward_order.size()) return;
  FsdpState* next = context_->post_forward_order[index - 1];
  if (next != nullptr) next->unshard(/*in_backward=*/true);  // null: its module is gone
}

void FsdpState::post_backward(bool may_reduce) {
  if (groups_.empty()) {
    training_state_ = TrainingState::kPostBackward;
    return;
  }
  context_->note("post_backward", name_);
  for (const auto& group : groups_) {
    if (group->reshards_after_backward() || group->sharded_state() == ShardedState::kSizesOnly) group->reshard();
  }
  const bool reduces =
      may_reduce && std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->reduce_grads; });
  tell_clock(reduces ? UnitMoment::kReduce : UnitMoment::kResharded);
  CommContext& comm = *context_->comm;
  const size_t max_reducing = std::max(comm.max_reducing, groups_.size());  // groups of one unit may overlap
  while (comm.reducing.size() + groups_.size() > max_reducing) comm.reducing.front()->wait_for_reduce_scatter();
  training_state_ = TrainingState::kPostBackward;  // not if that threw: finalize_backward can be called again
  for (const auto& group : groups_) {
    if (may_reduce && group->reduce_grads) {
      group->reduce();
    } else {
      group->accumulate_unsharded_grads();
    }
  }
  if (!context_->clock || !reduces) return;
  for (const auto& group : groups_) {
    group->wait_for_reduce_scatter();
    group->wait_for_all_reduce();
  }
  tell_clock(UnitMoment::kReduced);
}

void FsdpState::finish_missed_backward(bool reduces) {
  const bool owes =
      reduces && std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->owes_reduction(); });
  const bool idle = training_state_ == TrainingState::kIdle;
  if (training_state_ == TrainingState::kPreBackward || (idle && owes)) post_backward(reduces);
}

/// For the root's inputs, which a loader may leave in host memory.
void FsdpState::move_to_device(TensorRefs tensors) const {
  if (mesh_device_.is_cpu()) return;
  for (auto* tensor : tensors) {
    if (!tensor->defined() || tensor->device() == mesh_device_) continue;
    // Copying through pinned memory is not differentiable.
    *tensor = tensor->requires_grad() ? tensor->to(mesh_device_) : on_device(*tensor, mesh_device_);
  }
}

void FsdpState::check_outputs(TensorRefs outputs) const {
  TORCH_CHECK(!outputs.empty() || groups_.empty() || !c10::GradMode::is_enabled(), "'", name_,
              "' returns no tensors that fully_shard can see, so its backward would go unnoticed: give the returned "
              "struct a visit_tensors member (parallel/fsdp/tensor_visitor.h)");
  for (const auto* output : outputs) {
    if (!output->defined() || !output->has_storage()) continue;
    const auto* storage = output->storage().unsafeGetStorageImpl();
    const bool own =
        std::any_of(groups_.begin(), groups_.end(), [=](const auto& group) { return group->owns_unsharded(storage); });
    TORCH_CHECK(!own && find_fsdp_param(*output) == nullptr, "'", name_,
                "' returns a parameter or a view of it, which is freed after forward: return a clone, or use the "
                "parameter inside");
  }
}

void FsdpState::start_unshard() {
  const CommStreams& streams = ensure_context().streams();
  if (streams.enabled()) order_streams(streams.current(), *streams.copy_in);
  for (const auto& group : groups_) group->reshard_if_partial();
  unshard();
}

void FsdpState::wait_for_unshard() {
  for (const auto& group : groups_) {
    if (group->sharded_state() == ShardedState::kUnsharding) group->wait_for_unshard(/*in_forward=*/false);
  }
}

void FsdpState::reshard() {
  if (context_ == nullptr) return;
  for (const auto& group : groups_) group->reshard();
}

void FsdpState::share_comm(std::shared_ptr<CommContext> comm) {
  TORCH_CHECK(context_ == nullptr, "'", name_, "' has run already: call share_comm_context before the first forward");
  comm_ = std::move(comm);
}

std::shared_ptr<FsdpState> fsdp_state(const torch::nn::Module& module) {
  const auto* hooked = dynamic_cast<const HookedModule*>(&module);
  if (hooked == nullptr) return nullptr;
  const auto* hooks = dynamic_cast<const ModuleHooks*>(hooked->forward_hooks().get());
  return hooks == nullptr ? nullptr : hooks->state();
}

}  // namespace megashard
