// The gradient side of FsdpGroup: foreach_reduce of torch.distributed.fsdp.

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "parallel/copies/element_copy.h"
#include "parallel/fsdp/flat_view.h"
#include "parallel/fsdp/fsdp_group.h"
#include "parallel/fsdp/gradient_reduction.h"

namespace megashard {
namespace {

/// Element `index` of a buffer; the host waits for a device.
float element(const at::Tensor& buffer, int64_t index) {
  if (!buffer.is_cpu()) return flat_view(buffer, {1}, index).item<float>();
  float value = 0;
  const auto* at = static_cast<const char*>(buffer.const_data_ptr()) +
                   index * static_cast<int64_t>(buffer.element_size());
  copy_elements(&value, at::kFloat, at, buffer.scalar_type(), 1);
  return value;
}

}  // namespace

void FsdpGroup::stash_gradients() {
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
  if (streams.enabled()) order_streams(streams.current(), *streams.reduce_scatter);
  if (comm.held_reduction.reduction != nullptr) {
    comm.held_reduction.read.make_wait(*streams.reduce_scatter);
    comm.held_reduction.reduction.reset();
  }
  const StreamScope scope(streams.reduce_scatter);
  for (auto& buffer : reduction.buffers) {
    if (group->size() == 1) {
      buffer.output = buffer.input;
      continue;
    }
    const auto op = reduction.scaling.scatter;
    buffer.output = new_buffer(buffer.input.numel() / group->size(), buffer.input.scalar_type());
    buffer.work = communication_.reduce_scatter
                      ? communication_.reduce_scatter->run(buffer.output, buffer.input, op, *group)
                      : group->reduce_scatter_into(buffer.output, buffer.input, op);
  }
  if (streams.enabled()) reduction.scattered = StreamEvent::record(*streams.reduce_scatter);
}

void FsdpGroup::finish_reduce() {
  CommContext& comm = *context_->comm;
  const auto found = std::find(comm.reducing.begin(), comm.reducing.end(), this);
  if (found == comm.reducing.end()) return;
  comm.reducing.erase(found);
  const c10::NoGradGuard no_grad;
  const CommStreams& streams = comm.streams;
  for (auto& buffer : reduction_->buffers) buffer.work.wait();
  if (streams.enabled()) reduction_->scattered.make_wait(streams.current());
  for (auto& buffer : reduction_->buffers) buffer.input = at::Tensor();

  const StreamScope scope(streams.reduce_scatter);
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
  if (streams.enabled()) order_streams(*streams.reduce_scatter, *streams.all_reduce);
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
  const c10::NoGradGuard no_grad;
  for (auto& buffer : reduction_->buffers) buffer.work.wait();
  const StreamScope scope(context_->streams().all_reduce);
  assign_gradients();
}

/// On a stream of the user's; the end of backward waits for it as for an all-reduce.
void FsdpGroup::assign_gradients_on(const c10::Stream& stream) {
  const CommStreams& streams = context_->streams();
  order_streams(*streams.reduce_scatter, stream);
  {
    const StreamScope scope(stream);
    assign_gradients();
  }
  order_streams(stream, *streams.all_reduce);
}

void FsdpGroup::assign_gradients() {
  std::unique_ptr<GradientReduction> reduction = std::move(reduction_);
  const at::Tensor flags = reduction->buffers.back().output;
  const std::string unused = unused_parameters(*reduction);
  const int64_t flags_each = flags_per_param();
  auto somebody_had = [&](const GradientReduction::Entry& entry) {
    for (int64_t i = 0; i < flags_each; ++i) {
      if (element(flags, entry.flags + i) != 0) return true;
    }
    return flags_each == 0;
  };
  bool hooked = false;
  for (auto& buffer : reduction->buffers) {
    if (communication_.all_reduce_hook) communication_.all_reduce_hook(buffer.output);
    if (reduction->scaling.after != 1) buffer.output.div_(reduction->scaling.after);
    for (const auto& entry : buffer.entries) {
      if (!somebody_had(entry)) continue;  // none is assigned, as without sharding
      entry.param->add_sharded_gradient(buffer.output, entry.offset);
      hooked |= entry.param->has_gradient_hooks();
    }
  }
  const bool whole = state_ == State::kFull || state_ == State::kShapeOnly;
  if (hooked && whole) release();  // hooks see the local rows
  for (auto& buffer : reduction->buffers) {
    for (const auto& entry : buffer.entries) {
      if (hooked && somebody_had(entry)) entry.param->run_gradient_hooks();
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

/// A sentence if a parameter had a gradient on some ranks only and that is an error; the same on
/// every rank.
std::string FsdpGroup::unused_parameters(const GradientReduction& reduction) const {
  if (unused_ != UnusedParameters::kError) return "";
  const int64_t ranks = flags_per_param();
  const at::Tensor flags = reduction.buffers.back().output;
  std::string sentence;
  for (const auto& buffer : reduction.buffers) {
    for (const auto& entry : buffer.entries) {
      std::string with, without;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        auto& list = element(flags, entry.flags + rank) == 0 ? without : with;
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
  const CommStreams& streams = context_->streams();
  if (!streams.enabled()) return;
  order_streams(*streams.reduce_scatter, streams.current());
  order_streams(*streams.all_reduce, streams.current());
}

void FsdpGroup::wait_for_offloaded_gradients() {
  for (const auto& param : params_) param->wait_for_offloaded_gradient();
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
