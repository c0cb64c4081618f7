// The gradient side of FsdpGroup: foreach_reduce of torch.distributed.fsdp.

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "parallel/buffer_pool.h"
#include "parallel/element_copy.h"
#include "parallel/fsdp_group.h"
#include "parallel/gradient_reduction.h"

namespace megashard {
namespace {

/// Element `index` of a host buffer.
float element(const at::Tensor& buffer, int64_t index) {
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
    auto* to = static_cast<char*>(input.data_ptr()) +
               (rank * part_numel + place) * static_cast<int64_t>(input.element_size());
    copy_elements(to, input.scalar_type(), &number, at::kFloat, 1);
  }
}

/// Writes a whole gradient (or zeros) into the packed input: rank r's part starts at r *
/// part_numel.
void pack(const at::Tensor& gradient, int64_t chunk_numel, const at::Tensor& input, int ranks,
          int64_t offset) {
  const int64_t part_numel = input.numel() / ranks;
  const int64_t numel = gradient.defined() ? gradient.numel() : 0;
  const auto element_bytes = static_cast<int64_t>(input.element_size());
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t begin = std::min(rank * chunk_numel, numel);
    const int64_t count = std::min(chunk_numel, numel - begin);
    const int64_t to = rank * part_numel + offset;
    if (input.is_cpu()) {
      auto* destination = static_cast<char*>(input.data_ptr()) + to * element_bytes;
      if (count > 0) {
        const auto* source = static_cast<const char*>(gradient.const_data_ptr()) +
                             begin * static_cast<int64_t>(gradient.element_size());
        copy_elements(destination, input.scalar_type(), source, gradient.scalar_type(), count);
      }
      std::fill_n(destination + count * element_bytes, (chunk_numel - count) * element_bytes,
                  char{0});
    } else {
      if (count > 0) input.narrow(0, to, count).copy_(gradient.view({-1}).narrow(0, begin, count));
      if (count < chunk_numel) input.narrow(0, to + count, chunk_numel - count).zero_();
    }
  }
}

}  // namespace

at::ScalarType FsdpGroup::reduce_dtype() const {
  if (policy_.reduce_dtype) return *policy_.reduce_dtype;
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
  finish_all_reduce();  // of this group's last reduction
  auto reduction = std::make_unique<GradientReduction>();
  pack_gradients(*reduction);
  unreduced_ = false;
  if (reduction->buffers.empty()) return;
  context_->note("reduce", name_);
  reduction_ = std::move(reduction);
  scatter(*reduction_);
  context_->reducing = this;
}

/// This backward's gradient, and those of earlier ones that were not reduced.
at::Tensor FsdpGroup::take_gradient(FsdpParam& param) const {
  at::Tensor gradient = param.take_full_gradient();
  at::Tensor accumulated = std::exchange(param.accumulated_gradient(), {});
  if (!param.trainable()) return {};
  if (gradient.defined()) {
    TORCH_CHECK(gradient.numel() == param.global_numel(), "the gradient of '", param.name(), "' has sizes ",
                gradient.sizes(), " instead of ", param.global_sizes(),
                ": the parameter was used outside its unit's forward");
    gradient = gradient.contiguous();
  }
  if (!accumulated.defined()) return gradient;
  if (gradient.defined()) accumulated.add_(gradient);
  return accumulated;
}

void FsdpGroup::pack_gradients(GradientReduction& reduction) {
  const int ranks = layout_.shard_group->size();
  const bool alone = ranks == 1 && layout_.replicate_group == nullptr;
  const at::ScalarType dtype = reduce_dtype();
  const bool on_cpu = context_->streams.device.is_cpu();
  struct Part {
    FsdpParam* param;
    at::Tensor gradient;
    int64_t offset;  // in each rank's part of the packed buffer; kDirect: reduced where it lies
  };
  std::vector<Part> parts;
  int64_t part_numel = 0;
  for (const auto& param : params_) {
    at::Tensor gradient = take_gradient(*param);
    if (!param->trainable() || (alone && !gradient.defined())) continue;
    const int64_t chunk = param->chunk_numel();
    // Whether a gradient is there may differ from rank to rank, so only what all ranks know may
    // decide the route.
    const bool large = chunk * static_cast<int64_t>(c10::elementSize(dtype)) >= kDirectBytes;
    const bool even = chunk * ranks == param->global_numel();
    if (param->compute_dtype() == dtype && (alone || (on_cpu && even && large))) {
      parts.push_back({param.get(), std::move(gradient), kDirect});
    } else {
      parts.push_back({param.get(), std::move(gradient), part_numel});
      part_numel += chunk;
    }
  }
  // One more element per parameter counts the ranks that had a gradient: where none had, none is
  // assigned. Reading it would stall a device, where such a gradient is zero instead.
  const bool flagged = on_cpu && !alone;
  int64_t flag = flagged ? part_numel : -1;
  if (flagged) part_numel += static_cast<int64_t>(parts.size());
  GradientReduction::Buffer packed;
  if (part_numel > 0)
    packed.input = pooled_empty(ranks * part_numel, dtype, context_->streams.device);
  for (auto& [param, gradient, offset] : parts) {
    if (flagged) set_flag(packed.input, ranks, flag, gradient.defined());
    if (offset == kDirect) {
      const auto options = at::TensorOptions().dtype(dtype);
      at::Tensor flat =
          gradient.defined() ? gradient.view({-1}) : at::zeros({param->global_numel()}, options);
      reduction.buffers.push_back({flat.to(dtype), at::Tensor(), {{param, 0, flag}}, Work()});
    } else {
      pack(gradient, param->chunk_numel(), packed.input, ranks, offset);
      packed.entries.push_back({param, offset, flag});
    }
    if (flagged) ++flag;
  }
  if (packed.input.defined()) reduction.buffers.push_back(std::move(packed));
}

void FsdpGroup::scatter(GradientReduction& reduction) {
  const CommStreams& streams = context_->streams;
  const auto& group = layout_.shard_group;
  if (streams.enabled()) order_streams(streams.current(), *streams.reduce_scatter);
  if (context_->held_reduction.reduction != nullptr) {
    context_->held_reduction.read.make_wait(*streams.reduce_scatter);
    context_->held_reduction.reduction.reset();
  }
  const StreamScope scope(streams.reduce_scatter);
  for (auto& buffer : reduction.buffers) {
    if (group->size() == 1) {
      buffer.output = buffer.input;
      continue;
    }
    buffer.output = pooled_empty(buffer.input.numel() / group->size(), buffer.input.scalar_type(),
                                 streams.device);
    buffer.work = group->reduce_scatter_into(buffer.output, buffer.input, ReduceOp::kAvg);
  }
  if (streams.enabled()) reduction.scattered = StreamEvent::record(*streams.reduce_scatter);
}

void FsdpGroup::finish_reduce() {
  if (reduction_ == nullptr) return;
  const c10::NoGradGuard no_grad;
  const CommStreams& streams = context_->streams;
  for (auto& buffer : reduction_->buffers) buffer.work.wait();
  if (streams.enabled()) reduction_->scattered.make_wait(streams.current());
  for (auto& buffer : reduction_->buffers) buffer.input = at::Tensor();
  if (context_->reducing == this) context_->reducing = nullptr;

  const StreamScope scope(streams.reduce_scatter);
  if (layout_.replicate_group == nullptr) return assign_gradients(*reduction_);
  for (size_t i = 0; i < partial_.size(); ++i) reduction_->buffers.at(i).output.add_(partial_[i]);
  partial_.clear();
  if (!all_reduce_gradients) {
    for (auto& buffer : reduction_->buffers) partial_.push_back(std::move(buffer.output));
    reduction_.reset();
    return;
  }
  if (context_->all_reducing != nullptr) context_->all_reducing->finish_all_reduce();
  if (streams.enabled()) order_streams(*streams.reduce_scatter, *streams.all_reduce);
  const StreamScope all_reduce_scope(streams.all_reduce);
  for (auto& buffer : reduction_->buffers) {
    buffer.work = layout_.replicate_group->all_reduce(buffer.output, ReduceOp::kAvg);
  }
  context_->all_reducing = this;
}

void FsdpGroup::finish_all_reduce() {
  if (context_->all_reducing != this) return;
  context_->all_reducing = nullptr;
  const c10::NoGradGuard no_grad;
  for (auto& buffer : reduction_->buffers) buffer.work.wait();
  const StreamScope scope(context_->streams.all_reduce);
  assign_gradients(*reduction_);
}

void FsdpGroup::assign_gradients(GradientReduction& reduction) {
  const at::Tensor flags = reduction.buffers.back().output;
  for (auto& buffer : reduction.buffers) {
    for (const auto& entry : buffer.entries) {
      if (entry.used_flag >= 0 && element(flags, entry.used_flag) == 0) continue;
      entry.param->add_sharded_gradient(buffer.output, entry.offset);
    }
  }
  const CommStreams& streams = context_->streams;
  if (streams.enabled() && layout_.replicate_group != nullptr) {
    // The outputs were made on the reduce-scatter stream and read on another: they wait for the
    // next reduction.
    context_->held_reduction = {std::move(reduction_), StreamEvent::record(*streams.all_reduce)};
  }
  reduction_.reset();
}

void FsdpGroup::abandon_backward() noexcept {
  try {
    if (reduction_ != nullptr && context_->all_reducing != this) finish_reduce();
    if (reduction_ != nullptr) finish_all_reduce();
  } catch (const std::exception&) {
    // The group's collectives failed; the exception that ends backward says why.
  }
  reduction_.reset();
  if (context_ != nullptr) {
    if (context_->reducing == this) context_->reducing = nullptr;
    if (context_->all_reducing == this) context_->all_reducing = nullptr;
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
