#include "parallel/fsdp/detail/foreach_reduce.h"

#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "parallel/copies/element_copy.h"
#include "parallel/device/device_plan.h"
#include "parallel/device/storage.h"
#include "parallel/fsdp/detail/fsdp_context.h"

namespace megashard {
namespace {

/// Alignment of every rank's part of a packed buffer: below 16 bytes, NCCL copies element by element; 128 bytes are a
/// line of its LL128 protocol and of a GPU's cache.
constexpr int64_t kLine = 128;
int64_t whole_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

int replicas(const ShardLayout& layout) {
  return layout.replicate_group == nullptr ? 1 : layout.replicate_group->size();
}

/// Group of the reduce-scatters.
const ProcessGroupPtr& reduce_scatter_group(const ReduceGroup& group) {
  return group.comm.reduce_scatter_group ? group.comm.reduce_scatter_group : group.layout.shard_group;
}

/// True if there is one rank, which sends nothing. On a device its gradients then stay on their stream unless offload
/// copies or an all-reduce must overlap with backward.
bool stays_on_stream(const ReduceGroup& group, const CommStreams& streams) {
  if (group.layout.shard_group->size() > 1) return false;
  if (!streams.enabled()) return true;
  return group.layout.replicate_group == nullptr && !group.comm.all_reduce_hook_stream &&
         !group.params.front()->sharded_param().is_cpu();
}

/// Flags at the end of every rank's part that say which ranks had a gradient: per parameter one element, or one per
/// rank, of which this rank sets its own.
struct Flags {
  int64_t first;  // offset in a part
  int64_t each;
  int64_t mine;
};

void set_flags(const at::Tensor& input, int ranks, const Flags& flags, const std::vector<bool>& had) {
  const auto params = static_cast<int64_t>(had.size());
  const int64_t part_numel = input.numel() / ranks;
  const int64_t to_end = part_numel - flags.first;  // clears the padding, too
  if (input.is_cpu()) {
    const auto element = static_cast<int64_t>(input.element_size());
    const float yes = 1;
    for (int rank = 0; rank < ranks; ++rank) {
      auto* to = static_cast<char*>(input.data_ptr()) + (rank * part_numel + flags.first) * element;
      std::memset(to, 0, static_cast<size_t>(to_end * element));
      for (int64_t i = 0; i < params; ++i) {
        if (had[i])
          copy_elements(to + (i * flags.each + flags.mine) * element, input.scalar_type(), &yes, at::kFloat, 1);
      }
    }
    return;
  }
  const at::Tensor all = input.as_strided({ranks, to_end}, {part_numel, 1}, flags.first);
  all.fill_(flags.each > 1 ? 0 : 1);
  const at::Tensor mine = input.as_strided({ranks, params}, {part_numel, flags.each}, flags.first + flags.mine);
  if (flags.each > 1) mine.fill_(1);
  for (int64_t i = 0; i < params; ++i) {
    if (!had[i]) mine.select(1, i).zero_();
  }
}

/// Sum of this backward's gradient and unreduced gradients of earlier ones.
at::Tensor take_grad(FsdpParam& param) {
  at::Tensor grad = param.take_unsharded_grad();
  at::Tensor accumulated = std::exchange(param.unsharded_accumulated_grad(), {});
  if (!param.trainable()) return {};
  if (grad.defined()) {
    TORCH_CHECK(grad.numel() == param.geometry().numel, "the gradient of '", param.name(), "' has sizes ", grad.sizes(),
                " instead of ", at::IntArrayRef(param.geometry().sizes),
                ": the parameter was used outside its unit's forward");
    grad = grad.contiguous();
  }
  if (!accumulated.defined()) return grad;
  if (grad.defined()) accumulated.add_(grad);
  return accumulated;
}

/// Flag elements per parameter: one to count the ranks that had its gradient, one per rank to name them.
int64_t flags_per_param(const ReduceGroup& group) {
  const int ranks = group.layout.shard_group->size() * replicas(group.layout);
  if (ranks == 1) return 0;
  return group.unused == UnusedParameters::kError ? ranks : 1;
}

bool is_narrow(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

at::Tensor new_buffer(const ReduceGroup& group, int64_t numel, const CommStreams& streams) {
  return allocate_comm_buffer(group.comm.reduce_scatter.get(), "reduce-scatter", group.comm.memory,
                              *reduce_scatter_group(group), numel, group.dtype, streams.device);
}

/// Reads `numel` elements of a buffer from `first` on; blocks the host on a device.
std::vector<float> read_elements(const at::Tensor& buffer, int64_t first, int64_t numel) {
  const at::Tensor part = flat_view(buffer, {numel}, first).cpu();
  std::vector<float> values(numel);
  copy_elements(values.data(), at::kFloat, part.const_data_ptr(), part.scalar_type(), numel);
  return values;
}

}  // namespace

DivideFactors divide_factors(int shard_ranks, int replicas, at::ScalarType reduce_dtype, std::optional<double> factor,
                             bool force_sum) {
  const int ranks = shard_ranks * replicas;
  const double divisor = factor.value_or(ranks);
  if (ranks == 1) return {ReduceOp::kSum, ReduceOp::kSum, 1, divisor};
  if (reduce_dtype != at::kHalf) {
    if (!factor && !force_sum) return {};
    return {ReduceOp::kSum, ReduceOp::kSum, 1, divisor};
  }
  double before = 1;
  while (std::fmod(divisor, before) == 0 && divisor / before > before) before *= 2;
  return {ReduceOp::kSum, ReduceOp::kSum, before, divisor / before};
}

at::ScalarType reduce_dtype(const FsdpParams& params, const MixedPrecisionPolicy& policy) {
  if (policy.reduce_dtype) return *policy.reduce_dtype;
  std::optional<at::ScalarType> widest;
  for (const auto& param : params) {
    if (!param->trainable()) continue;
    widest = widest ? c10::promoteTypes(*widest, param->reduced_dtype()) : param->reduced_dtype();
  }
  return widest.value_or(at::kFloat);
}

Reduction pack_grads(const ReduceGroup& group, const CommStreams& streams) {
  const ProcessGroup& shard_group = *group.layout.shard_group;
  const int ranks = shard_group.size();
  const bool alone = ranks * replicas(group.layout) == 1;
  const at::ScalarType dtype = group.dtype;
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  Reduction reduction;
  const bool sums = group.comm.force_sum_reduction || group.comm.memory == GroupMemory::kSymmetric;
  reduction.factors = divide_factors(ranks, replicas(group.layout), dtype, group.comm.gradient_divide_factor, sums);
  if (streams.enabled()) {
    reduction.stream = stays_on_stream(group, streams) ? streams.current() : *streams.reduce_scatter;
  }
  const bool may_stay = reduction.factors.before == 1 && group.comm.reduce_scatter == nullptr && !group.comm.memory &&
                        (alone || acts_as_cpu(streams.device));
  const bool widens = !group.has_wide_grads && !alone && dtype == at::kFloat && shard_group.takes_narrow_sums();
  const bool adds_narrow = alone && dtype == at::kFloat && streams.enabled() && stays_on_stream(group, streams) &&
                           reduction.factors.after == 1 && !group.comm.all_reduce_hook;
  /// dtype in which a gradient is reduced. 16-bit gradients keep theirs if the collective sums them in fp32, or if the
  /// only rank adds them to an fp32 gradient.
  const auto sent_as = [&](const FsdpParam& param, const at::Tensor& grad) {
    const at::ScalarType own = param.compute_dtype();  // accumulated gradients (no sync) may have another dtype
    const bool is_added = adds_narrow && grad.defined() && grad.scalar_type() == own && param.adds_on_device();
    return is_narrow(own) && (widens || is_added) ? own : dtype;
  };
  struct Item {
    FsdpParam* param;
    at::Tensor grad;
    int64_t offset;  // in each rank's part of the packed buffer; kInPlace: not packed
    at::ScalarType sent;
  };
  constexpr int64_t kInPlace = -1;
  std::vector<Item> items;
  items.reserve(group.params.size());
  int64_t part_numel = 0;
  for (const auto& param : group.params) {
    at::Tensor grad = take_grad(*param);
    if (!param->trainable() || (alone && !grad.defined())) continue;
    const auto& geometry = param->geometry();
    // Ranks may differ in which gradients exist, so the decision must use only what is the same on all ranks.
    const at::ScalarType sent = sent_as(*param, grad);
    const bool stays = may_stay && sent == param->compute_dtype() && geometry.contiguous_chunks() &&
                       (alone || geometry.chunk_numel * element >= kMinInPlaceBytes);
    items.push_back({param.get(), std::move(grad), stays ? kInPlace : part_numel, sent});
    if (!stays) part_numel += geometry.chunk_numel;
  }
  const int64_t flags = items.empty() ? 0 : flags_per_param(group);
  reduction.flags_per_param = flags;
  const int64_t first_flag = part_numel;
  part_numel += static_cast<int64_t>(items.size()) * flags;
  if (flags > 0) part_numel = whole_lines(part_numel * element) / element;
  Reduction::Buffer packed;
  if (part_numel > 0) packed.input = new_buffer(group, ranks * part_numel, streams);
  if (flags > 0) {
    const int replica = replicas(group.layout) == 1 ? 0 : group.layout.replicate_group->rank();
    const int64_t mine = flags == 1 ? 0 : replica * ranks + shard_group.rank();
    std::vector<bool> had;
    for (const auto& item : items) had.push_back(item.grad.defined());
    set_flags(packed.input, ranks, {first_flag, flags, mine}, had);
  }
  reduction.buffers.reserve(items.size() + 1);
  packed.entries.reserve(items.size());
  std::vector<RowsCopy> copies;
  copies.reserve(items.size() * static_cast<size_t>(ranks));
  int64_t flag = first_flag;
  for (auto& [param, grad, offset, sent] : items) {
    const int64_t its_flag = flags == 0 ? -1 : flag;
    const bool had = grad.defined();
    if (offset == kInPlace) {
      const auto options = at::TensorOptions().dtype(sent).device(streams.device);
      const at::Tensor flat = had ? grad.view({-1}) : at::zeros({param->geometry().numel}, options);
      reduction.buffers.push_back({flat.to(sent), at::Tensor(), {{param, 0, its_flag, had}}, Work()});
    } else {
      const bool there = had && grad.numel() > 0;
      auto* first = static_cast<char*>(packed.input.data_ptr()) + offset * element;
      add_chunk_cat(copies, param->geometry(), there ? grad.const_data_ptr() : nullptr,
                    there ? grad.scalar_type() : dtype, {first, dtype, part_numel});
      packed.entries.push_back({param, offset, its_flag, had});
    }
    flag += flags;
  }
  if (!packed.input.defined()) return reduction;
  copy_batch(copies, streams.device);
  if (reduction.factors.before != 1) packed.input.div_(reduction.factors.before);
  reduction.buffers.push_back(std::move(packed));
  return reduction;
}

void reduce_scatter(Reduction& reduction, const ReduceGroup& group, const CommStreams& streams) {
  const auto& shard_group = reduce_scatter_group(group);
  const bool stays = stays_on_stream(group, streams);
  if (streams.enabled() && !stays) order_streams(streams.current(), *reduction.stream);
  const StreamScope scope(reduction.stream);
  for (auto& buffer : reduction.buffers) {
    if (stays) {
      buffer.output = buffer.input;
      continue;
    }
    const auto op = reduction.factors.reduce_scatter;
    buffer.output = new_buffer(group, buffer.input.numel() / shard_group->size(), streams);
    if (shard_group->size() == 1) {
      buffer.output.copy_(buffer.input);
      continue;
    }
    buffer.work = group.comm.reduce_scatter
                      ? group.comm.reduce_scatter->run(buffer.output, buffer.input, op, *shard_group)
                      : shard_group->reduce_scatter_into(buffer.output, buffer.input, op);
  }
  if (streams.enabled()) reduction.scattered = StreamEvent::record(*reduction.stream);
}

bool GradFlags::somebody_had(const Reduction::Entry& entry) const {
  for (int64_t rank = 0; !entry.mine && rank < each; ++rank) {
    if (had(entry, rank)) return true;
  }
  return entry.mine;
}

GradFlags read_flags(const Reduction& reduction, bool always) {
  GradFlags flags{.first = -1, .each = reduction.flags_per_param, .values = {}};
  int64_t entries = 0;
  bool all_mine = true;
  for (const auto& buffer : reduction.buffers) {
    for (const auto& entry : buffer.entries) {
      if (entries++ == 0 || entry.flags < flags.first) flags.first = entry.flags;
      all_mine &= entry.mine;
    }
  }
  if (flags.each > 0 && (always || !all_mine))
    flags.values = read_elements(reduction.buffers.back().output, flags.first, entries * flags.each);
  return flags;
}

std::string describe_unused(const Reduction& reduction, const GradFlags& flags) {
  std::string message;
  for (const auto& buffer : reduction.buffers) {
    for (const auto& entry : buffer.entries) {
      std::string with, without;
      for (int64_t rank = 0; rank < flags.each; ++rank) {
        auto& list = flags.had(entry, rank) ? with : without;
        list += (list.empty() ? "" : ", ") + std::to_string(rank);
      }
      if (with.empty() || without.empty()) continue;
      message += c10::str(message.empty() ? "" : "; ", "parameter '", entry.param->name(),
                          "' got a gradient on rank(s) ", with, " of its mesh but none on rank(s) ", without);
    }
  }
  if (!message.empty())
    message += ": use it on every rank, or set unused_parameters to kZeroFill, where it counts as zero";
  return message;
}

}  // namespace megashard
