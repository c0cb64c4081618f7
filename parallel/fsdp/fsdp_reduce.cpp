// The gradient side of FsdpGroup: foreach_reduce of torch.distributed.fsdp.

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "parallel/copies/element_copy.h"
#include "parallel/fsdp/flat_view.h"
#include "parallel/fsdp/fsdp_group.h"
#include "parallel/fsdp/gradient_reduction.h"
#include "parallel/fsdp/profiler_range.h"

namespace megashard {
namespace {

/// The `numel` elements of a buffer from `first` on; the host waits for a device.
std::vector<float> read_elements(const at::Tensor& buffer, int64_t first, int64_t numel) {
  const at::Tensor part = flat_view(buffer, {numel}, first).cpu();
  std::vector<float> values(numel);
  copy_elements(values.data(), at::kFloat, part.const_data_ptr(), part.scalar_type(), numel);
  return values;
}

/// Which ranks had the gradients of a reduction, as pack_gradients wrote it and the ranks summed it.
struct RankFlags {
  int64_t first = 0;          // entry.flags of the first entry
  int64_t each = 0;           // values for an entry
  std::vector<float> values;  // none where every gradient was this rank's too

  bool had(const GradientReduction::Entry& entry, int64_t rank) const {
    return values.at(entry.flags - first + rank) != 0;
  }
  bool somebody_had(const GradientReduction::Entry& entry) const {
    for (int64_t rank = 0; !entry.mine && rank < each; ++rank) {
      if (had(entry, rank)) return true;
    }
    return entry.mine;
  }
};

/// Costs a device a copy that the host waits for, if this rank missed a gradient or `always`.
RankFlags read_flags(const GradientReduction& reduction, int64_t each, bool always) {
  RankFlags flags{.first = -1, .each = each, .values = {}};
  int64_t entries = 0;
  bool all_mine = true;
  for (const auto& buffer : reduction.buffers) {
    for (const auto& entry : buffer.entries) {
      if (entries++ == 0 || entry.flags < flags.first) flags.first = entry.flags;
      all_mine &= entry.mine;
    }
  }
  if (each > 0 && (always || !all_mine))
    flags.values = read_elements(reduction.buffers.back().output, flags.first, entries * each);
  return flags;
}

/// A sentence if a parameter had a gradient on some ranks only; the same on every rank.
std::string unused_parameters(const GradientReduction& reduction, const RankFlags& flags) {
  std::string sentence;
  for (const auto& buffer : reduction.buffers) {
    for (const auto& entry : buffer.entries) {
      std::string with, without;
      for (int64_t rank = 0; rank < flags.each; ++rank) {
        auto& list = flags.had(entry, rank) ? with : without;
        list += (list.empty() ? "" : ", ") + std::to_string(rank);
      }
      if (with.empty() || without.empty()) continue;
      sentence += c10::str(sentence.empty() ? "" : "; ", "parameter '", entry.param->name(),
                           "' got a gradient on rank(s) ", with,
                           " of its mesh but none on rank(s) ", without);
    }
  }
  if (!sentence.empty())
    sentence +=
        ": use it on every rank, or set unused_parameters to kZeroFill, where it counts as zero";
  return sentence;
}

}  // namespace

void FsdpGroup::stash_gradients() {
  backward_ = torch::autograd::get_current_graph_task_id();
  for (const auto& param : params_) param->stash_gradient();
}

void FsdpGroup::accumulate_gradients() {
  const c10::NoGradGuard no_grad;
  unreduced_ = true;
  for (const auto& param : params_) {
    const at::Tensor gradient = param->take_full_gradient();
    if (!gradient.defined()) continue;
    at::Tensor& accumulated = param->accumulated_gradient();
    if (accumulated.defined()) {
      accumulated.add_(gradient);
    } else {
      accumulated = gradient.to(reduce_dtype());
    }
  }
}

bool FsdpGroup::owes_reduction() const {
  return reduce_gradients && (unreduced_ || (all_reduce_gradients && !partial_.empty()));
}

void FsdpGroup::start_reduce() {
  const ProfilerRange range("post_backward_reduce", name_);
  const c10::NoGradGuard no_grad;
  finish_reduce();  // of this group's last reduction
  finish_all_reduce();
  auto reduction = std::make_unique<GradientReduction>();
  pack_gradients(*reduction);
  unreduced_ = false;
  if (reduction->buffers.empty()) return;
  context_->note("reduce", name_);
  reduction_ = std::move(reduction);
  scatter(*reduction_);
  context_->comm->reducing.push_back(this);
}

void FsdpGroup::scatter(GradientReduction& reduction) {
  CommContext& comm = *context_->comm;
  const CommStreams& streams = comm.streams;
  const auto& group = layout_.shard_group;
  const bool in_place = reduces_in_place();
  if (streams.enabled()) {
    reduction.stream = in_place ? streams.current() : *streams.reduce_scatter;
    comm.reduces_on(*reduction.stream);
    if (!in_place) order_streams(streams.current(), *reduction.stream);
  }
  comm.drop_held_reduction();
  const StreamScope scope(reduction.stream);
  for (auto& buffer : reduction.buffers) {
    if (in_place) {
      buffer.output = buffer.input;
      continue;
    }
    const auto op = reduction.scaling.scatter;
    buffer.output = new_buffer(buffer.input.numel() / group->size(), buffer.input.scalar_type());
    if (group->size() == 1) {
      buffer.output.copy_(buffer.input);
      continue;
    }
    buffer.work = communication_.reduce_scatter
                      ? communication_.reduce_scatter->run(buffer.output, buffer.input, op, *group)
                      : group->reduce_scatter_into(buffer.output, buffer.input, op);
  }
  if (streams.enabled()) reduction.scattered = StreamEvent::record(*reduction.stream);
}

/// One rank has nothing to send. On a device its gradients stay on the stream that made them, unless
/// copies to the host or an all-reduce shall run beside backward.
bool FsdpGroup::reduces_in_place() const {
  if (layout_.shard_group->size() > 1) return false;
  if (!context_->streams().enabled()) return true;
  return layout_.replicate_group == nullptr && !communication_.all_reduce_hook_stream &&
         !params_.front()->shard().is_cpu();
}

void FsdpGroup::finish_reduce() {
  CommContext& comm = *context_->comm;
  const auto found = std::find(comm.reducing.begin(), comm.reducing.end(), this);
  if (found == comm.reducing.end()) return;
  comm.reducing.erase(found);
  const ProfilerRange range("finish_reduce", name_);
  const c10::NoGradGuard no_grad;
  const CommStreams& streams = comm.streams;
  for (auto& buffer : reduction_->buffers) buffer.work.wait();
  if (streams.enabled()) reduction_->scattered.make_wait(streams.current());
  for (auto& buffer : reduction_->buffers) buffer.input = at::Tensor();

  const StreamScope scope(reduction_->stream);
  if (layout_.replicate_group == nullptr) {
    const auto& own = communication_.all_reduce_hook_stream;
    return streams.enabled() && own ? assign_gradients_on(*own) : assign_gradients();
  }
  for (size_t i = 0; i < partial_.size(); ++i) reduction_->buffers.at(i).output.add_(partial_[i]);
  partial_.clear();
  if (!all_reduce_gradients) {
    for (auto& buffer : reduction_->buffers) partial_.push_back(std::move(buffer.output));
    reduction_.reset();
    return;
  }
  if (comm.all_reducing != nullptr) comm.all_reducing->finish_all_reduce();
  if (streams.enabled()) {
    order_streams(*streams.reduce_scatter, *streams.all_reduce);
    comm.reduces_on(*streams.all_reduce);
  }
  const StreamScope all_reduce_scope(streams.all_reduce);
  for (auto& buffer : reduction_->buffers) {
    buffer.work =
        layout_.replicate_group->all_reduce(buffer.output, reduction_->scaling.all_reduce);
  }
  comm.all_reducing = this;
}

void FsdpGroup::finish_all_reduce() {
  if (context_->comm->all_reducing != this) return;
  context_->comm->all_reducing = nullptr;
  const ProfilerRange range("finish_all_reduce", name_);
  const c10::NoGradGuard no_grad;
  for (auto& buffer : reduction_->buffers) buffer.work.wait();
  const StreamScope scope(context_->streams().all_reduce);
  assign_gradients();
}

/// On a stream of the user's.
void FsdpGroup::assign_gradients_on(const c10::Stream& stream) {
  order_streams(*context_->streams().reduce_scatter, stream);
  context_->comm->reduces_on(stream);
  const StreamScope scope(stream);
  assign_gradients();
}

void FsdpGroup::assign_gradients() {
  std::unique_ptr<GradientReduction> reduction = std::move(reduction_);
  const bool is_error = unused_ == UnusedParameters::kError;
  const RankFlags flags = read_flags(*reduction, flags_per_param(), is_error);
  const std::string unused = is_error ? unused_parameters(*reduction, flags) : "";
  bool hooked = false;
  for (auto& buffer : reduction->buffers) {
    if (communication_.all_reduce_hook) communication_.all_reduce_hook(buffer.output);
    if (reduction->scaling.after != 1) buffer.output.div_(reduction->scaling.after);
    for (const auto& entry : buffer.entries) {
      if (!flags.somebody_had(entry)) continue;  // none is assigned, as without sharding
      entry.param->add_sharded_gradient(buffer.output, entry.offset);
      hooked |= entry.param->has_gradient_hooks();
    }
  }
  const bool whole = state_ == State::kFull || state_ == State::kShapeOnly;
  if (hooked && whole) release();  // hooks see the local rows
  for (auto& buffer : reduction->buffers) {
    for (const auto& entry : buffer.entries) {
      if (hooked && flags.somebody_had(entry)) entry.param->run_gradient_hooks();
    }
  }
  CommContext& comm = *context_->comm;
  const bool elsewhere =
      layout_.replicate_group != nullptr || communication_.all_reduce_hook_stream;
  if (comm.streams.enabled() && elsewhere) {
    // The outputs were made on the reduce-scatter stream and read on this one: they wait for the
    // next reduction.
    comm.held_reduction = {std::move(reduction), StreamEvent::record(comm.streams.current())};
  }
  TORCH_CHECK(unused.empty(), unused);
}

void FsdpGroup::clear_pending_gradients() {
  for (const auto& param : params_) param->accumulated_gradient() = at::Tensor();
  unreduced_ = false;
  partial_.clear();
}

void FsdpGroup::synchronize_gradients() {
  if (!has_pending_gradients()) return;
  const bool all_reduce = std::exchange(all_reduce_gradients, true);
  start_reduce();
  finish_reduce();
  finish_all_reduce();
  all_reduce_gradients = all_reduce;
  context_->comm->wait_for_reductions();
}

void FsdpGroup::wait_for_host_memory() {
  for (const auto& param : params_) param->wait_for_offloaded_gradient();
  std::exchange(rows_read_, {}).synchronize();
}

void FsdpGroup::abandon_backward() noexcept {
  try {
    if (context_ != nullptr) {
      finish_reduce();
      finish_all_reduce();
    }
  } catch (const std::exception&) {
    // The group's collectives failed; the exception that ends backward says why.
  }
  reduction_.reset();
  if (context_ != nullptr) {
    CommContext& comm = *context_->comm;
    std::erase(comm.reducing, this);
    if (comm.all_reducing == this) comm.all_reducing = nullptr;
  }
  for (const auto& param : params_) param->take_full_gradient();
  try {
    release();
  } catch (const std::exception&) {
    for (const auto& param : params_) param->to_sharded();
    state_ = State::kSharded;
  }
}

}  // namespace megashard
