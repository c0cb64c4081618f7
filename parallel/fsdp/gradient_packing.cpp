// What a reduction of FsdpGroup sends: its gradients, packed into buffers.

#include <ATen/ops/zeros.h>

#include <utility>

#include "parallel/collectives/buffer_pool.h"
#include "parallel/copies/element_copy.h"
#include "parallel/fsdp/fsdp_group.h"
#include "parallel/fsdp/gradient_reduction.h"
#include "parallel/fsdp/shard_copies.h"

namespace megashard {
namespace {

/// Which ranks had a gradient, at the end of every rank's part: for each parameter one element, or
/// one for each rank, of which this rank writes its own.
struct Flags {
  int64_t first;  // place in a part
  int64_t each;
  int64_t mine;
};

void set_flags(const at::Tensor& input, int ranks, const Flags& flags,
               const std::vector<bool>& had) {
  const auto params = static_cast<int64_t>(had.size());
  const int64_t part_numel = input.numel() / ranks;
  if (input.is_cpu()) {
    for (int64_t place = 0; place < params * flags.each; ++place) {
      const float number = place % flags.each == flags.mine && had[place / flags.each] ? 1 : 0;
      for (int rank = 0; rank < ranks; ++rank) {
        auto* to = static_cast<char*>(input.data_ptr()) +
                   (rank * part_numel + flags.first + place) *
                       static_cast<int64_t>(input.element_size());
        copy_elements(to, input.scalar_type(), &number, at::kFloat, 1);
      }
    }
    return;
  }
  const at::Tensor all =
      input.as_strided({ranks, params, flags.each}, {part_numel, flags.each, 1}, flags.first);
  if (flags.each > 1) all.zero_();
  const at::Tensor mine = all.select(2, flags.mine);
  mine.fill_(1);
  for (int64_t i = 0; i < params; ++i) {
    if (!had[i]) mine.select(1, i).zero_();
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
/// them.
int64_t FsdpGroup::flags_per_param() const {
  const int ranks = layout_.shard_group->size() * replicas();
  if (ranks == 1) return 0;
  return unused_ == UnusedParameters::kError ? ranks : 1;
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
  const int64_t first_of_all = part_numel;
  part_numel += static_cast<int64_t>(parts.size()) * flags;
  GradientReduction::Buffer packed;
  if (part_numel > 0) packed.input = new_buffer(ranks * part_numel, dtype);
  const int replica = replicas() == 1 ? 0 : layout_.replicate_group->rank();
  const int64_t mine = flags == 1 ? 0 : replica * ranks + layout_.shard_group->rank();
  if (flags > 0) {
    std::vector<bool> had;
    for (const auto& part : parts) had.push_back(part.gradient.defined());
    set_flags(packed.input, ranks, {first_of_all, flags, mine}, had);
  }
  std::vector<RowsCopy> copies;
  int64_t flag = first_of_all;
  for (auto& [param, gradient, offset] : parts) {
    const int64_t first_flag = flags == 0 ? -1 : flag;
    const bool had = gradient.defined();
    if (offset == kStays) {
      const auto options = at::TensorOptions().dtype(dtype).device(context_->streams().device);
      const at::Tensor flat =
          had ? gradient.view({-1}) : at::zeros({param->geometry().numel}, options);
      reduction.buffers.push_back(
          {flat.to(dtype), at::Tensor(), {{param, 0, first_flag, had}}, Work()});
    } else {
      const bool there = had && gradient.numel() > 0;
      auto* first = static_cast<char*>(packed.input.data_ptr()) +
                    offset * static_cast<int64_t>(c10::elementSize(dtype));
      add_split(copies, param->geometry(), there ? gradient.const_data_ptr() : nullptr,
                there ? gradient.scalar_type() : dtype, {first, dtype, part_numel});
      packed.entries.push_back({param, offset, first_flag, had});
    }
    flag += flags;
  }
  if (!packed.input.defined()) return;
  copy_batch(copies, context_->streams().device);
  if (reduction.scaling.before != 1) packed.input.div_(reduction.scaling.before);
  reduction.buffers.push_back(std::move(packed));
}

}  // namespace megashard
