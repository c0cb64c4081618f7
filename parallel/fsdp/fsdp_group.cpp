#include "parallel/fsdp/fsdp_group.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "parallel/fsdp/backward_scope.h"
#include "parallel/fsdp/gradient_reduction.h"
#include "parallel/fsdp/profiler_range.h"

namespace megashard {
namespace {

/// Whether a dtype was changed by it.
bool adopt_rebound_data(const GatherPlan::Params& params, const CommStreams& streams) {
  bool converted = false, rebound = false;
  for (const auto& param : params) {
    const auto* before = param->shard().unsafeGetTensorImpl();
    converted |= param->adopt_rebound_data();
    rebound |= param->shard().unsafeGetTensorImpl() != before;
  }
  // Rows that were cut out of the new data just now, after what begins an iteration has waited.
  if (rebound && streams.enabled()) order_streams(streams.current(), *streams.copy_in);
  return converted;
}

}  // namespace

FsdpGroup::FsdpGroup(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                     ShardLayout layout, const FullyShardOptions& options)
    : reshard_after_forward(options.reshard_after_forward),
      layout_(std::move(layout)),
      policy_(options.mixed_precision),
      unused_(options.unused_parameters) {
  for (const auto& [name, parameter] : parameters) {
    params_.push_back(std::make_unique<FsdpParam>(parameter, name, layout_, this, options));
  }
}

FsdpGroup::~FsdpGroup() = default;

void FsdpGroup::prepare(FsdpContext& context) {
  context_ = &context;
  if (prepared_) return;
  adopt_rebound_data(params_, context.streams());
  std::string on_meta;
  for (const auto& param : params_) {
    if (param->is_meta()) on_meta += (on_meta.empty() ? "" : ", ") + param->name();
  }
  TORCH_CHECK(on_meta.empty(), "these parameters are still on the meta device: ", on_meta,
              ". Materialise and initialise the model (post-construction init, or a checkpoint) before its forward");
  make_plans();
  prepared_ = true;
}

void FsdpGroup::make_plans() {
  for (const auto& param : params_) param->prepare(policy_.param_dtype);
  rows_plan_ = GatherPlan::of_rows(layout_.shard_group, params_, plan_options());
  slices_plan_ = GatherPlan();
}

GatherPlan::Options FsdpGroup::plan_options() const {
  return {communication_.all_gather, communication_.memory, communication_.async_op};
}

void FsdpGroup::change_plans() {
  release();
  if (prepared_) make_plans();
}

void FsdpGroup::set_communication(GroupCommunication communication) {
  TORCH_CHECK(!communication.memory || (communication.all_gather == nullptr &&
              communication.reduce_scatter == nullptr), "buffers from the process group's memory and custom collectives, "
              "which allocate by themselves, exclude each other: take one of them");
  TORCH_CHECK(!communication.all_reduce_hook_stream || layout_.replicate_group == nullptr, "the all-reduce hook of '", name_,
              "' cannot have a stream of its own: its mesh has replicas, whose all-reduce runs on a stream already. Leave the "
              "stream out, or shard over a 1-D mesh");
  communication_ = std::move(communication);
  change_plans();
}

void FsdpGroup::set_extension(FsdpParam& param, std::shared_ptr<AllGatherExtension> extension) {
  param.set_extension(std::move(extension));
  change_plans();
}

bool FsdpGroup::owns_full(const c10::StorageImpl* storage) const {
  return std::any_of(params_.begin(), params_.end(), [&](const auto& param) {
    return param->full().owns(storage) ||
           (param->shares_shard() && param->shard().storage().unsafeGetStorageImpl() == storage);
  });
}

void FsdpGroup::gather() {
  if (state_ == State::kGathering || state_ == State::kFull) return;
  const c10::NoGradGuard no_grad;
  if (state_ == State::kShapeOnly) release();
  if (state_ == State::kSharded) {
    const bool converted = adopt_rebound_data(params_, context_->streams());
    TORCH_CHECK(!converted || !has_pending_gradients(), "the dtype of '", name_, "' was changed while its gradients wait "
                "for their reduction: call synchronize_gradients or clear_pending_gradients before Module::to");
    if (converted) make_plans();
  }
  gathering_ = state_ == State::kPostForward ? &slices_plan_ : &rows_plan_;
  const ProfilerRange range("all_gather", name_);
  context_->note("gather", name_);
  gathering_->start(context_->streams());
  state_ = State::kGathering;
}

void FsdpGroup::wait(bool in_forward) {
  if (state_ == State::kFull) return;
  TORCH_INTERNAL_ASSERT(state_ == State::kGathering);
  const ProfilerRange range("all_gather_copy_out", name_);
  const c10::NoGradGuard no_grad;
  CommContext& comm = *context_->comm;
  if (in_forward) comm.drop_held_gather();
  gathering_->finish(comm.streams);
  if (comm.streams.enabled() && params_.front()->shard().is_cpu())
    rows_read_ = StreamEvent::record(comm.streams.current());
  if (at::Tensor packed = gathering_->take_packed(); packed.defined()) {
    comm.drop_held_gather();
    comm.held_gather = {std::move(packed), StreamEvent::record(comm.streams.current())};
    if (!in_forward) comm.drop_held_gather();
  }
  for (const auto& param : params_) param->to_full();
  gathering_->drop_slices();
  gathering_ = nullptr;
  state_ = State::kFull;
}

void FsdpGroup::show_shapes() {
  if (state_ == State::kPostForward) release();
  if (state_ != State::kSharded) return;
  for (const auto& param : params_) param->to_full();
  state_ = State::kShapeOnly;
}

void FsdpGroup::release() {
  if (state_ == State::kGathering) wait(/*in_forward=*/false);  // a prefetch that nobody used
  if (state_ == State::kPostForward) slices_plan_.drop_slices();
  if (state_ == State::kShapeOnly) {
    for (const auto& param : params_) param->to_sharded();
  }
  const FsdpParam* changed = nullptr;
  if (state_ == State::kFull) {
    context_->note("release", name_);
    for (const auto& param : params_) {
      if (param->changed_while_full()) changed = param.get();
      param->to_sharded();
      if (!param->shares_shard()) param->full().release();
    }
  }
  state_ = State::kSharded;
  some_released_ = false;
  TORCH_CHECK(changed == nullptr, "parameter '", changed->name(), "' was changed in place while it was gathered, which "
              "its resharding loses: change sharded_view(parameter).local between steps instead");
}

void FsdpGroup::gradient_complete(FsdpParam& param) {
  if (state_ != State::kFull || !reshard_after_backward || !releases_one_by_one) return;
  // A backward inside another one knows only its own uses of the parameter.
  if (torch::autograd::get_current_graph_task_id() != backward_) return;
  if (param.shares_shard() || param.full().has_views() || param.changed_while_full()) return;
  param.to_sharded();
  param.full().release();
  some_released_ = true;
}

void FsdpGroup::release_incomplete() {
  if (some_released_) release();
}

void FsdpGroup::release_if_idle() {
  if (context_ == nullptr || !context_->idle()) return;
  release();
  wait_for_host_memory();
}

void FsdpGroup::release_after_forward() {
  using Kind = ReshardAfterForward::Kind;
  const Kind kind = reshard_after_forward.kind;
  if (state_ != State::kFull || kind == Kind::kNever) return;
  const bool backward_follows = backward_may_follow();
  if (kind == Kind::kDefault && of_root_ && backward_follows) return;
  if (kind != Kind::kTo || !backward_follows) return release();
  if (slices_plan_.group() == nullptr) {
    const int ranks = reshard_after_forward.ranks;
    const int first = layout_.shard_group->rank() / ranks * ranks;
    std::vector<int> members(ranks);
    for (int i = 0; i < ranks; ++i) members[i] = first + i;
    const auto name = c10::str("post_forward/", ranks, "/", first, "/", name_);
    slices_plan_ = GatherPlan::of_slices(layout_.shard_group->subgroup(members, name), params_,
                                         plan_options());
  }
  slices_plan_.keep_slices();
  release();
  const CommStreams& streams = context_->streams();
  if (streams.enabled()) order_streams(streams.current(), *streams.copy_in);
  state_ = State::kPostForward;
}

}  // namespace megashard
