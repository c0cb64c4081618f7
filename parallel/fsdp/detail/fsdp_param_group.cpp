#include "parallel/fsdp/detail/fsdp_param_group.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>
#include <utility>

#include "parallel/collectives/wait_error.h"
#include "parallel/fsdp/recompute_scope.h"

namespace megashard {
namespace {

/// Range in PyTorch's profiler, "FSDP::all_gather (model.layers.0)", as FSDP2's record_function; the simulated device
/// takes unit names from it. Free without an active profiler.
class ProfilerRange {
 public:
  ProfilerRange(const char* what, const std::string& unit) : record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive()) record_.before(c10::str("FSDP::", what, " (", unit, ")"));
  }

 private:
  at::RecordFunction record_;
};

}  // namespace

FsdpParamGroup::FsdpParamGroup(const std::vector<std::pair<std::string, at::Tensor>>& parameters, ShardLayout layout,
                               const FullyShardOptions& options)
    : layout_(std::move(layout)), policy_(options.mixed_precision), unused_(options.unused_parameters) {
  reshard_after_forward = options.reshard_after_forward;
  for (const auto& [name, parameter] : parameters) {
    params_.push_back(std::make_unique<FsdpParam>(parameter, name, layout_, this, options));
  }
}

FsdpParamGroup::FsdpParamGroup(FsdpParams params, const FsdpParamGroup& like)
    : GroupControls(like),
      layout_(like.layout_),
      policy_(like.policy_),
      unused_(like.unused_),
      params_(std::move(params)) {
  for (const auto& param : params_) param->set_group(this);
}

FsdpParamGroup::~FsdpParamGroup() {
  if (context_ != nullptr) context_->comm->forget(this);  // another root may share it
}

void FsdpParamGroup::lazy_init(const std::shared_ptr<FsdpContext>& context) {
  if (std::exchange(context_, context) != nullptr) return;
  reset_sharded_params();
  std::string on_meta;
  for (const auto& param : params_) {
    if (param->is_meta()) on_meta += (on_meta.empty() ? "" : ", ") + param->name();
  }
  if (!on_meta.empty()) context_ = nullptr;
  TORCH_CHECK(on_meta.empty(), "these parameters are still on the meta device: ", on_meta,
              ". Materialise and initialise the model (post-construction init, or a checkpoint) before its forward");
}

void FsdpParamGroup::move_to(const std::shared_ptr<FsdpContext>& context) {
  if (context_ != nullptr) context_ = context;
}

/// Adopts changes made to the sharded parameters from outside. Returns true if a dtype changed.
bool FsdpParamGroup::reset_sharded_params() {
  bool converted = false, rebound = false;
  for (const auto& param : params_) {
    const auto* before = param->sharded_param().unsafeGetTensorImpl();
    converted |= param->reset_sharded_param();
    rebound |= param->sharded_param().unsafeGetTensorImpl() != before;
  }
  // New rows were copied just now, after the start of the iteration ordered the streams.
  const CommStreams& streams = context_->streams();
  if (rebound && streams.enabled()) order_streams(streams.current(), *streams.copy_in);
  return converted;
}

void FsdpParamGroup::init_all_gather() {
  for (const auto& param : params_) param->init_unsharded(policy_.param_dtype);
  place_adjacent(params_);
  all_gather_ = ForeachAllGather::of_shards(layout_.shard_group, params_, comm, unshard_async_op);
  post_forward_all_gather_ = ForeachAllGather();
}

FsdpParams FsdpParamGroup::take_params() {
  forget_all_gathers();
  return std::exchange(params_, {});
}

void FsdpParamGroup::forget_all_gathers() {
  reshard();
  all_gather_ = ForeachAllGather();
}

bool FsdpParamGroup::owns_unsharded(const c10::StorageImpl* storage) const {
  return std::any_of(params_.begin(), params_.end(), [&](const auto& param) {
    return param->unsharded().owns(storage) ||
           (param->aliases_sharded_param() && param->sharded_param().storage().unsafeGetStorageImpl() == storage);
  });
}

void FsdpParamGroup::unshard() {
  if (sharded_state_ == ShardedState::kUnsharding || sharded_state_ == ShardedState::kUnsharded) return;
  const c10::NoGradGuard no_grad;
  if (sharded_state_ == ShardedState::kSizesOnly) reshard();
  if (sharded_state_ == ShardedState::kSharded) {
    const bool converted = reset_sharded_params();
    TORCH_CHECK(!converted || !has_pending_grads(), "the dtype of '", name_,
                "' was changed while its gradients wait for their reduction: call synchronize_gradients or "
                "clear_pending_gradients before Module::to");
    if (converted || all_gather_.group() == nullptr) init_all_gather();
  }
  unsharding_ = sharded_state_ == ShardedState::kShardedPostForward ? &post_forward_all_gather_ : &all_gather_;
  const ProfilerRange range("all_gather", name_);
  context_->note("unshard", name_);
  unsharding_->start(context_->streams());
  sharded_state_ = ShardedState::kUnsharding;
}

void FsdpParamGroup::wait_for_unshard(bool in_forward) {
  if (sharded_state_ == ShardedState::kUnsharded) return;
  TORCH_INTERNAL_ASSERT(sharded_state_ == ShardedState::kUnsharding);
  const ProfilerRange range("all_gather_copy_out", name_);
  const WaitPlace place(name_);
  const c10::NoGradGuard no_grad;
  CommContext& shared = *context_->comm;
  if (in_forward) shared.drop_held_gather();
  unsharding_->copy_out(shared.streams);
  if (shared.streams.enabled() && params_.front()->sharded_param().is_cpu())
    shards_read_ = StreamEvent::record(shared.streams.current());
  if (at::Tensor packed = unsharding_->take_packed(); packed.defined()) {
    shared.hold_gather(std::move(packed));
    if (!in_forward) shared.drop_held_gather();
  }
  for (const auto& param : params_) param->to_unsharded();
  unsharding_->drop_slices();
  unsharding_ = nullptr;
  sharded_state_ = ShardedState::kUnsharded;
}

void FsdpParamGroup::show_unsharded_sizes() {
  if (sharded_state_ == ShardedState::kShardedPostForward) reshard();
  if (sharded_state_ != ShardedState::kSharded) return;
  for (const auto& param : params_) param->to_unsharded();
  sharded_state_ = ShardedState::kSizesOnly;
}

void FsdpParamGroup::reshard() {
  if (sharded_state_ == ShardedState::kUnsharding) wait_for_unshard(/*in_forward=*/false);  // an unused prefetch
  if (sharded_state_ == ShardedState::kShardedPostForward) post_forward_all_gather_.drop_slices();
  if (sharded_state_ == ShardedState::kSizesOnly) {
    for (const auto& param : params_) param->to_sharded();
  }
  const FsdpParam* changed = nullptr;
  if (sharded_state_ == ShardedState::kUnsharded) {
    context_->note("reshard", name_);
    for (const auto& param : params_) {
      if (param->changed_while_unsharded()) changed = param.get();
      param->free_unsharded();
    }
  }
  sharded_state_ = ShardedState::kSharded;
  partial_reshard_ = false;
  TORCH_CHECK(changed == nullptr, "parameter '", changed->name(),
              "' was changed in place while it was gathered, which its resharding loses: change "
              "reshard_and_view(parameter).local between steps instead");
}

bool FsdpParamGroup::reshards_after_backward() const {
  const bool stays = reshard_after_forward.kind == ReshardAfterForward::Kind::kNever && !is_last_microbatch;
  return reshard_after_backward && !stays;
}

void FsdpParamGroup::reshard_when_complete(FsdpParam& param) {
  if (sharded_state_ != ShardedState::kUnsharded || !reshards_after_backward() || !reshards_one_by_one) return;
  // A nested backward only knows its own uses of the parameter.
  if (torch::autograd::get_current_graph_task_id() != backward_) return;
  if (param.aliases_sharded_param() || param.unsharded().has_views() || param.changed_while_unsharded()) return;
  param.free_unsharded();
  partial_reshard_ = true;
}

void FsdpParamGroup::reshard_if_partial() {
  if (partial_reshard_) reshard();
}

void FsdpParamGroup::reshard_if_idle() {
  if (context_ == nullptr || !context_->idle()) return;
  reshard();
  wait_for_host_memory();
}

void FsdpParamGroup::post_forward() {
  using Kind = ReshardAfterForward::Kind;
  const Kind kind = reshard_after_forward.kind;
  if (sharded_state_ != ShardedState::kUnsharded || kind == Kind::kNever) return;
  const bool backward_follows = backward_may_follow();
  if (kind == Kind::kDefault && of_root_ && backward_follows) return;
  if (kind != Kind::kTo || !backward_follows) return reshard();
  if (post_forward_all_gather_.group() == nullptr) {
    const int ranks = reshard_after_forward.ranks;
    const int first = layout_.shard_group->rank() / ranks * ranks;
    std::vector<int> members(ranks);
    for (int i = 0; i < ranks; ++i) members[i] = first + i;
    const auto name = c10::str("post_forward/", ranks, "/", first, "/", name_);
    post_forward_all_gather_ =
        ForeachAllGather::of_slices(layout_.shard_group->subgroup(members, name), params_, comm, unshard_async_op);
  }
  post_forward_all_gather_.keep_slices();
  reshard();
  const CommStreams& streams = context_->streams();
  if (streams.enabled()) order_streams(streams.current(), *streams.copy_in);
  sharded_state_ = ShardedState::kShardedPostForward;
}

void FsdpParamGroup::set_aside_sharded_grads() {
  backward_ = torch::autograd::get_current_graph_task_id();
  for (const auto& param : params_) param->set_aside_sharded_grad();
}

void FsdpParamGroup::accumulate_unsharded_grads() {
  const c10::NoGradGuard no_grad;
  unreduced_ = true;
  for (const auto& param : params_) {
    const at::Tensor grad = param->take_unsharded_grad();
    if (!grad.defined()) continue;
    at::Tensor& accumulated = param->unsharded_accumulated_grad();
    if (accumulated.defined()) {
      accumulated.add_(grad);
    } else {
      accumulated = grad.to(reduce_dtype(params_, policy_));
    }
  }
}

bool FsdpParamGroup::owes_reduction() const {
  return reduce_grads && (unreduced_ || (all_reduce_grads && !partial_.empty()));
}

void FsdpParamGroup::reduce() {
  const ProfilerRange range("post_backward_reduce", name_);
  const c10::NoGradGuard no_grad;
  wait_for_reduce_scatter();  // of this group's previous reduction
  wait_for_all_reduce();
  const bool has_wide_grads =
      unreduced_ || std::ranges::any_of(params_, [](const auto& param) { return param->has_own_grad_dtype(); });
  const ReduceGroup group{params_, layout_, comm, reduce_dtype(params_, policy_), unused_, has_wide_grads};
  CommContext& shared = *context_->comm;
  auto reduction = std::make_unique<Reduction>(pack_grads(group, shared.streams));
  unreduced_ = false;
  if (reduction->buffers.empty()) return;
  context_->note("reduce", name_);
  reduction_ = std::move(reduction);
  if (reduction_->stream) shared.reduces_on(*reduction_->stream);
  shared.drop_held_reduction();
  reduce_scatter(*reduction_, group, shared.streams);
  shared.reducing.push_back(this);
}

void FsdpParamGroup::wait_for_reduce_scatter() {
  CommContext& shared = *context_->comm;
  const auto found = std::find(shared.reducing.begin(), shared.reducing.end(), this);
  if (found == shared.reducing.end()) return;
  shared.reducing.erase(found);
  const ProfilerRange range("finish_reduce", name_);
  const WaitPlace place(name_);
  const c10::NoGradGuard no_grad;
  const CommStreams& streams = shared.streams;
  for (auto& buffer : reduction_->buffers) buffer.work.wait();
  if (streams.enabled()) reduction_->scattered.make_wait(streams.current());
  for (auto& buffer : reduction_->buffers) buffer.input = at::Tensor();

  const StreamScope scope(reduction_->stream);
  if (layout_.replicate_group == nullptr) {
    const auto& own = comm.all_reduce_hook_stream;
    return streams.enabled() && own ? assign_grads_on(*own) : assign_grads();
  }
  for (size_t i = 0; i < partial_.size(); ++i) reduction_->buffers.at(i).output.add_(partial_[i]);
  partial_.clear();
  if (!all_reduce_grads) {
    for (auto& buffer : reduction_->buffers) partial_.push_back(std::move(buffer.output));
    reduction_.reset();
    return;
  }
  const size_t most = gradients_are_views() ? CommContext::kMaxAllReducing : 1;
  while (shared.all_reducing.size() >= most) shared.all_reducing.front()->wait_for_all_reduce();
  if (streams.enabled()) {
    order_streams(*streams.reduce_scatter, *streams.all_reduce);
    shared.reduces_on(*streams.all_reduce);
  }
  const StreamScope all_reduce_scope(streams.all_reduce);
  for (auto& buffer : reduction_->buffers) {
    buffer.work = layout_.replicate_group->all_reduce(buffer.output, reduction_->factors.all_reduce);
  }
  shared.all_reducing.push_back(this);
}

/// True if every reduced buffer is kept as gradient views, so that none is freed.
bool FsdpParamGroup::gradients_are_views() const {
  return std::ranges::all_of(reduction_->buffers, [](const Reduction::Buffer& buffer) {
    return std::ranges::all_of(buffer.entries,
                               [&](const auto& entry) { return entry.param->takes_reduced_rows(buffer.output); });
  });
}

void FsdpParamGroup::wait_for_all_reduce() {
  if (std::erase(context_->comm->all_reducing, this) == 0) return;
  const ProfilerRange range("finish_all_reduce", name_);
  const WaitPlace place(name_);
  const c10::NoGradGuard no_grad;
  for (auto& buffer : reduction_->buffers) buffer.work.wait();
  const StreamScope scope(context_->streams().all_reduce);
  assign_grads();
}

/// Assigns gradients on a stream given by the user.
void FsdpParamGroup::assign_grads_on(const c10::Stream& stream) {
  order_streams(*context_->streams().reduce_scatter, stream);
  context_->comm->reduces_on(stream);
  const StreamScope scope(stream);
  assign_grads();
}

void FsdpParamGroup::assign_grads() {
  std::unique_ptr<Reduction> reduction = std::move(reduction_);
  const GradFlags flags = read_flags(*reduction, /*always=*/unused_ == UnusedParameters::kError);
  const std::string unused = unused_ == UnusedParameters::kError ? describe_unused(*reduction, flags) : "";
  bool hooked = false;
  for (auto& buffer : reduction->buffers) {
    if (comm.all_reduce_hook) comm.all_reduce_hook(buffer.output);
    if (reduction->factors.after != 1) buffer.output.div_(reduction->factors.after);
    for (const auto& entry : buffer.entries) {
      if (!flags.somebody_had(entry)) continue;  // no rank had it: stays undefined, as without sharding
      entry.param->accumulate_sharded_grad(buffer.output, entry.offset);
      hooked |= entry.param->has_grad_hooks();
    }
  }
  const bool unsharded = sharded_state_ == ShardedState::kUnsharded || sharded_state_ == ShardedState::kSizesOnly;
  if (hooked && unsharded) reshard();  // hooks see the local rows
  for (auto& buffer : reduction->buffers) {
    for (const auto& entry : buffer.entries) {
      if (hooked && flags.somebody_had(entry)) entry.param->run_grad_hooks();
    }
  }
  CommContext& shared = *context_->comm;
  const bool elsewhere = layout_.replicate_group != nullptr || comm.all_reduce_hook_stream;
  if (shared.streams.enabled() && elsewhere) {
    // Holds buffers that no gradient keeps: written on the reduce-scatter stream, read on this one.
    std::erase_if(reduction->buffers, [](const auto& buffer) { return buffer.output.storage().use_count() > 1; });
    if (!reduction->buffers.empty()) shared.hold_reduction(std::move(reduction));
  }
  TORCH_CHECK(unused.empty(), unused);
}

void FsdpParamGroup::clear_pending_grads() {
  for (const auto& param : params_) param->unsharded_accumulated_grad() = at::Tensor();
  unreduced_ = false;
  partial_.clear();
}

void FsdpParamGroup::synchronize_grads() {
  if (!has_pending_grads()) return;
  const bool all_reduce = std::exchange(all_reduce_grads, true);
  reduce();
  wait_for_reduce_scatter();
  wait_for_all_reduce();
  all_reduce_grads = all_reduce;
  context_->comm->wait_for_reductions();
}

void FsdpParamGroup::wait_for_host_memory() {
  for (const auto& param : params_) param->wait_for_offloaded_grad();
  std::exchange(shards_read_, {}).synchronize();
}

void FsdpParamGroup::abandon_backward() noexcept {
  try {
    if (context_ != nullptr) {
      wait_for_reduce_scatter();
      wait_for_all_reduce();
    }
  } catch (const std::exception&) {
    // The group's collectives failed; the exception that ended backward has the reason.
  }
  reduction_.reset();
  if (context_ != nullptr) context_->comm->forget(this);
  for (const auto& param : params_) param->take_unsharded_grad();
  try {
    reshard();
  } catch (const std::exception&) {
    for (const auto& param : params_) param->to_sharded();
    sharded_state_ = ShardedState::kSharded;
  }
}

}  // namespace megashard
