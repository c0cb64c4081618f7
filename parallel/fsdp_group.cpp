#include "parallel/fsdp_group.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "parallel/buffer_pool.h"
#include "parallel/element_copy.h"
#include "parallel/gradient_reduction.h"

namespace megashard {
namespace {

constexpr int64_t kAlignment = 16;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Elements of a 1-D byte tensor seen as another dtype.
at::Tensor as_elements(const at::Tensor& bytes, at::ScalarType dtype) { return bytes.view(dtype); }

}  // namespace

FsdpGroup::FsdpGroup(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                     ShardLayout layout, const FullyShardOptions& options)
    : reshard_after_forward(options.reshard_after_forward),
      layout_(std::move(layout)),
      policy_(options.mixed_precision) {
  for (const auto& [name, parameter] : parameters) {
    params_.push_back(std::make_unique<FsdpParam>(parameter, name, layout_, this));
  }
}

FsdpGroup::~FsdpGroup() = default;

void FsdpGroup::prepare(FsdpContext& context) {
  if (context_ != nullptr) return;
  std::string on_meta;
  for (const auto& param : params_) {
    param->adopt_rebound_data();
    if (param->is_meta()) on_meta += (on_meta.empty() ? "" : ", ") + param->name();
  }
  TORCH_CHECK(on_meta.empty(), "these parameters are still on the meta device: ", on_meta,
              ". Materialise and initialise the model (post-construction init, or a checkpoint) before its forward");
  for (const auto& param : params_) param->prepare(policy_.param_dtype);
  shard_plan_ = plan_gather(layout_.shard_group, /*from_shards=*/true);
  context_ = &context;
}

FsdpGroup::GatherPlan FsdpGroup::plan_gather(ProcessGroupPtr group, bool from_shards) const {
  GatherPlan plan{std::move(group), from_shards, {}, 0};
  const int ranks = plan.group->size();
  for (const auto& param : params_) {
    if (param->shares_shard()) continue;
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(param->compute_dtype()));
    const int64_t full_bytes = param->global_numel() * element_bytes;
    const int64_t chunk_numel =
        from_shards ? param->chunk_numel() : (param->global_numel() + ranks - 1) / ranks;
    Piece piece{param.get(), chunk_numel * element_bytes, kDirect, {}};
    const bool direct =
        ranks == 1 || (param->shard().is_cpu() && piece.chunk_bytes * ranks == full_bytes &&
                       piece.chunk_bytes >= kDirectBytes);
    if (!direct) {
      piece.packed_offset = plan.packed_bytes;
      plan.packed_bytes += aligned(piece.chunk_bytes);
    }
    plan.pieces.push_back(std::move(piece));
  }
  return plan;
}

void FsdpGroup::make_post_forward_plan() {
  if (post_forward_plan_.group != nullptr) return;
  const auto& group = layout_.shard_group;
  const int ranks = reshard_after_forward.ranks;
  const int first = group->rank() / ranks * ranks;
  std::vector<int> members(ranks);
  for (int i = 0; i < ranks; ++i) members[i] = first + i;
  post_forward_plan_ = plan_gather(
      group->subgroup(members, c10::str("post_forward/", ranks, "/", first, "/", name_)),
      /*from_shards=*/false);
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
  if (state_ == State::kSharded) {
    for (const auto& param : params_) param->adopt_rebound_data();
  }
  gathering_ = state_ == State::kPostForward ? &post_forward_plan_ : &shard_plan_;
  context_->note("gather", name_);
  start_gather();
  state_ = State::kGathering;
}

void FsdpGroup::copy_in(const Piece& piece, const at::Tensor& destination) const {
  const at::Tensor& source = piece.kept.defined() ? piece.kept : piece.param->shard();
  if (source.is_cpu()) {
    const auto from = piece.kept.defined() ? at::kByte : piece.param->stored_dtype();
    const auto to = piece.kept.defined() ? at::kByte : piece.param->compute_dtype();
    copy_elements(destination.data_ptr(), to, source.const_data_ptr(), from, source.numel());
  } else if (piece.kept.defined()) {
    destination.copy_(source);
  } else {
    as_elements(destination, piece.param->compute_dtype())
        .narrow(0, 0, source.numel())
        .copy_(source.reshape({-1}));
  }
}

void FsdpGroup::start_gather() {
  GatherPlan& plan = *gathering_;
  const CommStreams& streams = context_->streams;
  const int ranks = plan.group->size();
  const int rank = plan.group->rank();
  if (ranks == 1) return;  // finish_gather copies on the current stream
  {
    const StreamScope scope(streams.copy_in);
    if (plan.packed_bytes > 0)
      packed_ = pooled_empty(ranks * plan.packed_bytes, at::kByte, streams.device);
    for (auto& piece : plan.pieces) {
      if (piece.packed_offset == kDirect) {
        piece.param->full().allocate();
        copy_in(piece,
                piece.param->full().bytes().narrow(0, rank * piece.chunk_bytes, piece.chunk_bytes));
      } else {
        copy_in(piece, packed_.narrow(0, rank * plan.packed_bytes + piece.packed_offset,
                                      piece.chunk_bytes));
      }
    }
  }
  if (streams.enabled()) order_streams(*streams.copy_in, *streams.all_gather);
  const StreamScope scope(streams.all_gather);
  if (plan.packed_bytes > 0) {
    works_.push_back(plan.group->all_gather_into(
        packed_, packed_.narrow(0, rank * plan.packed_bytes, plan.packed_bytes)));
  }
  for (auto& piece : plan.pieces) {
    if (piece.packed_offset != kDirect) continue;
    const at::Tensor& full = piece.param->full().bytes();
    works_.push_back(plan.group->all_gather_into(
        full, full.narrow(0, rank * piece.chunk_bytes, piece.chunk_bytes)));
  }
  if (streams.enabled()) gathered_ = StreamEvent::record(*streams.all_gather);
}

void FsdpGroup::wait(bool in_forward) {
  if (state_ == State::kFull) return;
  TORCH_INTERNAL_ASSERT(state_ == State::kGathering);
  const c10::NoGradGuard no_grad;
  const CommStreams& streams = context_->streams;
  if (in_forward) context_->drop_held_gather();
  finish_gather();
  if (streams.enabled() && packed_.defined()) {
    context_->drop_held_gather();
    context_->held_gather = {std::move(packed_), StreamEvent::record(streams.current())};
    if (!in_forward) context_->drop_held_gather();
  }
  packed_ = at::Tensor();
  for (const auto& param : params_) param->to_full();
  for (auto& piece : gathering_->pieces) piece.kept = at::Tensor();
  gathering_ = nullptr;
  state_ = State::kFull;
}

void FsdpGroup::finish_gather() {
  GatherPlan& plan = *gathering_;
  for (auto& work : works_) work.wait();
  works_.clear();
  if (context_->streams.enabled() && plan.group->size() > 1)
    gathered_.make_wait(context_->streams.current());
  for (auto& piece : plan.pieces) {
    piece.param->full().allocate();
    if (plan.group->size() == 1) {
      copy_in(piece, piece.param->full().bytes());
    } else if (piece.packed_offset != kDirect) {
      copy_out(piece, packed_);
    }
  }
}

void FsdpGroup::copy_out(const Piece& piece, const at::Tensor& packed) const {
  const at::Tensor& full = piece.param->full().bytes();
  const int64_t full_bytes = full.numel();
  const int64_t packed_bytes = gathering_->packed_bytes;
  for (int64_t rank = 0, at = 0; at < full_bytes; ++rank, at += piece.chunk_bytes) {
    const int64_t bytes = std::min(piece.chunk_bytes, full_bytes - at);
    const int64_t from = rank * packed_bytes + piece.packed_offset;
    if (full.is_cpu()) {
      copy_elements(static_cast<char*>(full.data_ptr()) + at, at::kByte,
                    static_cast<const char*>(packed.const_data_ptr()) + from, at::kByte, bytes);
    } else {
      full.narrow(0, at, bytes).copy_(packed.narrow(0, from, bytes));
    }
  }
}

void FsdpGroup::release() {
  if (state_ == State::kGathering) wait(/*in_forward=*/false);  // a prefetch that nobody used
  if (state_ == State::kPostForward) {
    for (auto& piece : post_forward_plan_.pieces) piece.kept = at::Tensor();
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
  TORCH_CHECK(changed == nullptr, "parameter '", changed->name(), "' was changed in place while it was gathered, which "
              "its resharding loses: change sharded_view(parameter).local between steps instead");
}

void FsdpGroup::release_if_idle() {
  if (context_ != nullptr && context_->idle()) release();
}

void FsdpGroup::release_after_forward() {
  using Kind = ReshardAfterForward::Kind;
  const Kind kind = reshard_after_forward.kind;
  if (state_ != State::kFull || kind == Kind::kNever) return;
  const bool backward_follows = c10::GradMode::is_enabled();
  if (kind == Kind::kDefault && of_root_ && backward_follows) return;
  if (kind != Kind::kTo || !backward_follows) return release();
  make_post_forward_plan();
  const int rank = post_forward_plan_.group->rank();
  for (auto& piece : post_forward_plan_.pieces) {
    const at::Tensor& full = piece.param->full().bytes();
    const int64_t begin = std::min(rank * piece.chunk_bytes, full.numel());
    const int64_t bytes = std::min(piece.chunk_bytes, full.numel() - begin);
    piece.kept = full.narrow(0, begin, bytes).clone();
  }
  release();
  if (context_->streams.enabled())
    order_streams(context_->streams.current(), *context_->streams.copy_in);
  state_ = State::kPostForward;
}

}  // namespace megashard
