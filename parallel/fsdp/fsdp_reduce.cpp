// The gradient side of FsdpGroup: foreach_reduce of torch.distributed.fsdp.

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "parallel/collectives/buffer_pool.h"
#include "parallel/copies/element_copy.h"
#include "parallel/fsdp/flat_view.h"
#include "parallel/fsdp/fsdp_group.h"
#include "parallel/fsdp/gradient_reduction.h"
#include "parallel/fsdp/shard_copies.h"

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

/// Writes 1 or 0 at one place of every rank's part.
void set_flag(const at::Tensor& input, int ranks, int64_t place, bool value) {
  const int64_t part_numel = input.numel() / ranks;
  const float number = value ? 1.0F : 0.0F;
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t index = rank * part_numel + place;
    if (input.is_cpu()) {
      auto* to =
          static_cast<char*>(input.data_ptr()) + index * static_cast<int64_t>(input.element_size());
      copy_elements(to, input.scalar_type(), &number, at::kFloat, 1);
    } else {
      flat_view(input, {1}, index).fill_(number);
    }
  }
}

}  // namespace

at::ScalarType FsdpGroup::reduce_dtype() const {
  if (policy_.reduce_dtype) return *policy_.reduce_dtype;
  if (policy_.grad_dtype) return *policy_.grad_dtype;
  const FsdpParam* first = nullptr;
  for (const auto& param : params_) {
    if (!param->trainable()) continue;
    if (first == nullptr) first = param.get();
    TORCH_CHECK(param->compute_dtype() == first->compute_dtype(), "the gradients of one group are reduced in one dtype, "
                "but '", first->name(), "' computes in ", first->compute_dtype(), " and '", param->name(), "' in ",
                param->compute_dtype(), ": set MixedPrecisionPolicy.reduce_dtype or param_dtype");
  }
  return first == nullptr ? at::kFloat : first->compute_dtype();
}

int FsdpGroup::replicas() const {
  return layout_.replicate_group == nullptr ? 1 : layout_.replicate_group->size();
}

GradientScaling FsdpGroup::scaling() const {
  return gradient_scaling(layout_.shard_group->size(), replicas(), reduce_dtype(),
                          communication_.divide_factor, communication_.force_sum);
}

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

/// This backward's gradient, and those of earlier ones that were not reduced.
at::Tensor FsdpGroup::take_gradient(FsdpParam& param) const {
  at::Tensor gradient = param.take_full_gradient();
  at::Tensor accumulated = std::exchange(param.accumulated_gradient(), {});
  if (!param.trainable()) return {};
  if (gradient.defined()) {
    TORCH_CHECK(gradient.numel() == param.geometry().numel, "the gradient of '", param.name(), "' has sizes ",
                gradient.sizes(), " instead of ", at::IntArrayRef(param.geometry().sizes),
                ": the parameter was used outside its unit's forward");
    gradient = gradient.contiguous();
  }
  if (!accumulated.defined()) return gradient;
  if (gradient.defined()) accumulated.add_(gradient);
  return accumulated;
}

/// Elements that say which ranks had a parameter's gradient. One counts them; one a rank names
/// them. Reading them would stall a device, where only the error asks for it: by default a gradient
/// that no rank had is zero there, and none elsewhere.
int64_t FsdpGroup::flags_per_param() const {
  const int ranks = layout_.shard_group->size() * replicas();
  if (ranks == 1) return 0;
  if (unused_ == UnusedParameters::kError) return ranks;
  return context_->streams().device.is_cpu() ? 1 : 0;
}

at::Tensor FsdpGroup::new_buffer(int64_t numel, at::ScalarType dtype) const {
  const auto device = context_->streams().device;
  if (communication_.reduce_scatter) {
    return checked_buffer(communication_.reduce_scatter->allocate(numel, dtype, device),
                          "the custom reduce-scatter", numel, dtype, device);
  }
  if (communication_.memory)
    return layout_.shard_group->allocate(numel, dtype, device, *communication_.memory);
  return pooled_empty(numel, dtype, device);
}

void FsdpGroup::pack_gradients(GradientReduction& reduction) {
  const int ranks = layout_.shard_group->size();
  const bool alone = ranks * replicas() == 1;
  const at::ScalarType dtype = reduce_dtype();
  reduction.scaling = scaling();
  const bool may_stay = reduction.scaling.before == 1 && communication_.reduce_scatter == nullptr &&
                        !communication_.memory && (alone || context_->streams().device.is_cpu());
  struct Part {
    FsdpParam* param;
    at::Tensor gradient;
    int64_t offset;  // in each rank's part of the packed buffer; kStays: reduced where it lies
  };
  constexpr int64_t kStays = -1;
  std::vector<Part> parts;
  int64_t part_numel = 0;
  for (const auto& param : params_) {
    at::Tensor gradient = take_gradient(*param);
    if (!param->trainable() || (alone && !gradient.defined())) continue;
    const auto& geometry = param->geometry();
    // Whether a gradient is there may differ from rank to rank, so only what all ranks know may
    // decide the route.
    const int64_t bytes = geometry.chunk_numel * static_cast<int64_t>(c10::elementSize(dtype));
    const bool stays = may_stay && param->compute_dtype() == dtype && geometry.even() &&
                       geometry.runs == 1 && (alone || bytes >= kDirectBytes);
    parts.push_back({param.get(), std::move(gradient), stays ? kStays : part_numel});
    if (!stays) part_numel += geometry.chunk_numel;
  }
  const int64_t flags = parts.empty() ? 0 : flags_per_param();
  int64_t flag = part_numel;
  part_numel += static_cast<int64_t>(parts.size()) * flags;
  GradientReduction::Buffer packed;
  if (part_numel > 0) packed.input = new_buffer(ranks * part_numel, dtype);
  const int replica = replicas() == 1 ? 0 : layout_.replicate_group->rank();
  const int64_t mine = flags == 1 ? 0 : replica * ranks + layout_.shard_group->rank();
  std::vector<RowsCopy> copies;
  for (auto& [param, gradient, offset] : parts) {
    for (int64_t i = 0; i < flags; ++i)
      set_flag(packed.input, ranks, flag + i, i == mine && gradient.defined());
    const int64_t first_flag = flags == 0 ? -1 : flag;
    if (offset == kStays) {
      const auto options = at::TensorOptions().dtype(dtype).device(context_->streams().device);
      const at::Tensor flat =
          gradient.defined() ? gradient.view({-1}) : at::zeros({param->geometry().numel}, options);
      reduction.buffers.push_back({flat.to(dtype), at::Tensor(), {{param, 0, first_flag}}, Work()});
    } else {
      const bool there = gradient.defined() && gradient.numel() > 0;
      auto* first = static_cast<char*>(packed.input.data_ptr()) +
                    offset * static_cast<int64_t>(c10::elementSize(dtype));
      add_split(copies, param->geometry(), there ? gradient.const_data_ptr() : nullptr,
                there ? gradient.scalar_type() : dtype, {first, dtype, part_numel});
      packed.entries.push_back({param, offset, first_flag});
    }
    flag += flags;
  }
  if (!packed.input.defined()) return;
  copy_batch(copies, context_->streams().device);
  if (reduction.scaling.before != 1) packed.input.div_(reduction.scaling.before);
  reduction.buffers.push_back(std::move(packed));
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
