#include "parallel/fsdp/detail/foreach_all_gather.h"

#include <algorithm>
#include <utility>

#include "parallel/device/device_plan.h"
#include "parallel/device/storage.h"
#include "parallel/fsdp/detail/fsdp_context.h"

namespace megashard {
namespace {

constexpr int64_t kAlignment = 16;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t nbytes(int64_t numel, at::ScalarType dtype) { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }

}  // namespace

ForeachAllGather::ForeachAllGather(ProcessGroupPtr group, bool from_shards, const CommOptions& options,
                                   bool on_current_stream)
    : group_(std::move(group)),
      from_shards_(from_shards),
      custom_(options.all_gather),
      memory_(options.memory),
      on_current_stream_(on_current_stream) {}

ForeachAllGather ForeachAllGather::of_shards(ProcessGroupPtr group, const FsdpParams& params,
                                             const CommOptions& options, bool on_current_stream) {
  ForeachAllGather gather(std::move(group), /*from_shards=*/true, options, on_current_stream);
  for (const auto& param : params) {
    if (param->aliases_sharded_param()) continue;
    const auto& geometry = param->geometry();
    Item item{param.get(), nbytes(geometry.chunk_numel, param->compute_dtype())};
    if (param->extension() != nullptr) gather.add_extension(item);
    gather.place(std::move(item), geometry.contiguous_chunks());
  }
  return gather;
}

ForeachAllGather ForeachAllGather::of_slices(ProcessGroupPtr group, const FsdpParams& params,
                                             const CommOptions& options, bool on_current_stream) {
  ForeachAllGather gather(std::move(group), /*from_shards=*/false, options, on_current_stream);
  for (const auto& param : params) {
    if (param->aliases_sharded_param()) continue;
    const int64_t numel = param->geometry().numel;
    const int64_t slice = (numel + gather.ranks() - 1) / gather.ranks();
    gather.place({param.get(), nbytes(slice, param->compute_dtype())}, slice * gather.ranks() == numel);
  }
  return gather;
}

void ForeachAllGather::place(Item item, bool contiguous) {
  const auto device = item.param->unsharded().tensor().device();
  const bool in_place = item.payloads.empty() && custom_ == nullptr && !memory_ &&
                        (ranks() == 1 || (contiguous && acts_as_cpu(device) && item.bytes >= kMinInPlaceBytes));
  if (!in_place) {
    item.offset = packed_bytes_;
    packed_bytes_ += aligned(item.bytes);
  }
  items_.push_back(std::move(item));
}

void ForeachAllGather::add_extension(Item& item) const {
  const FsdpParam& param = *item.param;
  const auto& geometry = param.geometry();
  item.shape = {.whole_sizes = geometry.as_cut(geometry.sizes),
                .chunk_sizes = geometry.as_cut(geometry.local_sizes(0)),
                .shard_dim = geometry.dim,
                .ranks = ranks(),
                .rank = rank(),
                .stored_dtype = param.stored_dtype(),
                .compute_dtype = param.compute_dtype()};
  item.bytes = 0;
  for (const auto& what : param.extension()->payloads(item.shape)) {
    item.payloads.push_back({what, item.bytes});
    item.bytes += aligned(nbytes(what.numel, what.dtype));
  }
  TORCH_CHECK_VALUE(!item.payloads.empty(), "the all-gather extension of '", param.name(),
                    "' sends nothing: it must return at least one payload");
}

at::Tensor ForeachAllGather::payload_view(const Item& item, size_t index, bool of_all_ranks) const {
  const auto& [what, offset] = item.payloads[index];
  const int64_t from = item.offset + offset;
  if (!of_all_ranks) return typed_view(packed_, what.dtype, {what.numel}, rank() * packed_bytes_ + from);
  return typed_rows(packed_, what.dtype, ranks(), what.numel, packed_bytes_ / nbytes(1, what.dtype), from);
}

/// This rank's part of an unsharded storage.
at::Tensor ForeachAllGather::own_part(const Item& item) const {
  return flat_view(item.param->unsharded().bytes(), {item.bytes}, rank() * item.bytes);
}

void ForeachAllGather::copy_in(const Item& item) {
  const FsdpParam& param = *item.param;
  if (!item.payloads.empty()) {
    c10::SmallVector<at::Tensor, 4> payloads;
    for (size_t i = 0; i < item.payloads.size(); ++i) payloads.push_back(payload_view(item, i, false));
    at::Tensor rows = param.sharded_param_on_device();
    if (param.geometry().merged > 1) rows = rows.view(item.shape.chunk_sizes);
    param.extension()->pack(item.shape, rows, payloads);
    return;
  }
  const bool in_place = item.offset == kInPlace;
  const at::Tensor& buffer = in_place ? item.param->unsharded().bytes() : packed_;
  const int64_t at = in_place ? rank() * item.bytes : rank() * packed_bytes_ + item.offset;
  const at::Tensor& source = sources_.emplace_back(from_shards_ ? param.sharded_param_on_device() : item.slice);
  if (source.numel() == 0) return;
  copies_.push_back({.from = source.const_data_ptr(),
                     .to = static_cast<char*>(buffer.data_ptr()) + at,
                     .from_dtype = source.scalar_type(),
                     .to_dtype = from_shards_ ? param.compute_dtype() : at::kByte,
                     .row_numel = source.numel(),
                     .numel = source.numel()});
}

void ForeachAllGather::run_copies(const CommStreams& streams) {
  copy_batch(copies_, streams.device);
  drop_copies();
}

void ForeachAllGather::drop_copies() {
  copies_.clear();
  sources_.clear();
}

void ForeachAllGather::start(const CommStreams& streams) {
  drop_copies();
  const bool packs = packed_bytes_ > 0;
  if (ranks() == 1 && !packs) return;  // copy_out copies on the current stream
  {
    const StreamScope scope(on_current_stream_ ? std::nullopt : streams.copy_in);
    if (packs) {
      packed_ = allocate_comm_buffer(custom_.get(), "all-gather", memory_, *group_, ranks() * packed_bytes_, at::kByte,
                                     streams.device);
    }
    try {
      for (const auto& item : items_) {
        if (item.offset == kInPlace && ranks() == 1) continue;
        if (item.offset == kInPlace) item.param->unsharded().allocate();
        copy_in(item);
      }
    } catch (...) {  // a shard has no memory: no gather runs
      packed_ = at::Tensor();
      throw;
    }
    run_copies(streams);
  }
  if (ranks() == 1) {
    if (streams.enabled()) gathered_ = StreamEvent::record(*streams.copy_in);
    return;
  }
  if (streams.enabled()) order_streams(on_current_stream_ ? streams.current() : *streams.copy_in, *streams.all_gather);
  const StreamScope scope(streams.all_gather);
  if (packs) {
    const auto own = flat_view(packed_, {packed_bytes_}, rank() * packed_bytes_);
    works_.push_back(custom_ ? custom_->run(packed_, own, *group_) : group_->all_gather_into(packed_, own));
  }
  for (const auto& item : items_) {
    if (item.offset != kInPlace) continue;
    works_.push_back(group_->all_gather_into(item.param->unsharded().bytes(), own_part(item)));
  }
  if (streams.enabled()) gathered_ = StreamEvent::record(*streams.all_gather);
}

void ForeachAllGather::copy_out(const CommStreams& streams) {
  drop_copies();
  for (auto& work : works_) work.wait();
  works_.clear();
  if (streams.enabled()) gathered_.make_wait(streams.current());
  for (const auto& item : items_) {
    item.param->unsharded().allocate();
    if (item.offset != kInPlace) {
      copy_out(item);
    } else if (ranks() == 1) {
      copy_in(item);
    }
  }
  run_copies(streams);
  if (!streams.enabled()) packed_ = at::Tensor();
}

void ForeachAllGather::copy_out(const Item& item) {
  FsdpParam& param = *item.param;
  const UnshardedStorage& unsharded = param.unsharded();
  if (!item.payloads.empty()) {
    c10::SmallVector<at::Tensor, 4> payloads;
    for (size_t i = 0; i < item.payloads.size(); ++i) payloads.push_back(payload_view(item, i, true));
    const at::Tensor& whole = unsharded.tensor();
    return param.extension()->unpack(item.shape, payloads,
                                     param.geometry().merged > 1 ? whole.view(item.shape.whole_sizes) : whole);
  }
  const at::Tensor& bytes = unsharded.bytes();
  if (bytes.numel() == 0) return;
  void* first = static_cast<char*>(packed_.data_ptr()) + item.offset;
  if (from_shards_) {
    const auto dtype = param.compute_dtype();
    return add_copy_out(copies_, param.geometry(), {first, dtype, packed_bytes_ / nbytes(1, dtype)}, bytes.data_ptr());
  }
  copies_.push_back({.from = first,
                     .to = bytes.data_ptr(),
                     .rows = ranks(),
                     .row_numel = item.bytes,
                     .numel = bytes.numel(),
                     .from_stride = packed_bytes_,
                     .to_stride = item.bytes});
}

void ForeachAllGather::keep_slices() {
  for (auto& item : items_) {
    const at::Tensor& bytes = item.param->unsharded().bytes();
    const int64_t begin = std::min(rank() * item.bytes, bytes.numel());
    item.slice = bytes.narrow(0, begin, std::min(item.bytes, bytes.numel() - begin)).clone();
  }
}

void ForeachAllGather::drop_slices() {
  for (auto& item : items_) item.slice = at::Tensor();
}

}  // namespace megashard
