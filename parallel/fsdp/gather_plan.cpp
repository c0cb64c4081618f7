#include "parallel/fsdp/gather_plan.h"

#include <algorithm>
#include <utility>

#include "parallel/collectives/buffer_pool.h"
#include "parallel/fsdp/flat_view.h"

namespace megashard {
namespace {

constexpr int64_t kAlignment = 16;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t bytes_of(int64_t numel, at::ScalarType dtype) {
  return numel * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace

GatherPlan::GatherPlan(ProcessGroupPtr group, bool from_rows, Options options)
    : group_(std::move(group)), from_rows_(from_rows), options_(std::move(options)) {}

GatherPlan GatherPlan::of_rows(ProcessGroupPtr group, const Params& params, Options options) {
  GatherPlan plan(std::move(group), /*from_rows=*/true, std::move(options));
  for (const auto& param : params) {
    if (param->shares_shard()) continue;
    const auto& geometry = param->geometry();
    Piece piece{param.get(), bytes_of(geometry.chunk_numel, param->compute_dtype())};
    if (param->extension() != nullptr) plan.add_extension(piece);
    plan.place(std::move(piece), geometry.even() && geometry.runs == 1);
  }
  return plan;
}

GatherPlan GatherPlan::of_slices(ProcessGroupPtr group, const Params& params, Options options) {
  GatherPlan plan(std::move(group), /*from_rows=*/false, std::move(options));
  for (const auto& param : params) {
    if (param->shares_shard()) continue;
    const int64_t numel = param->geometry().numel;
    const int64_t part = (numel + plan.ranks() - 1) / plan.ranks();
    plan.place({param.get(), bytes_of(part, param->compute_dtype())}, part * plan.ranks() == numel);
  }
  return plan;
}

void GatherPlan::place(Piece piece, bool contiguous) {
  const bool direct = piece.payloads.empty() && options_.custom == nullptr && !options_.memory &&
                      (ranks() == 1 || (contiguous && piece.param->full().tensor().is_cpu() &&
                                        piece.bytes >= kDirectBytes));
  if (direct) {
    piece.own_part = piece.param->full().lasting_part(piece.bytes, rank() * piece.bytes);
  } else {
    piece.offset = packed_bytes_;
    packed_bytes_ += aligned(piece.bytes);
  }
  pieces_.push_back(std::move(piece));
}

void GatherPlan::add_extension(Piece& piece) const {
  const FsdpParam& param = *piece.param;
  const auto& geometry = param.geometry();
  piece.shape = {.whole_sizes = geometry.as_cut(geometry.sizes),
                 .chunk_sizes = geometry.as_cut(geometry.local_sizes(0)),
                 .shard_dim = geometry.dim,
                 .ranks = ranks(),
                 .rank = rank(),
                 .stored_dtype = param.stored_dtype(),
                 .compute_dtype = param.compute_dtype()};
  piece.bytes = 0;
  for (const auto& what : param.extension()->payloads(piece.shape)) {
    piece.payloads.push_back({what, piece.bytes});
    piece.bytes += aligned(bytes_of(what.numel, what.dtype));
  }
  TORCH_CHECK(!piece.payloads.empty(), "the all-gather extension of '", param.name(), "' sends nothing: it must "
              "return at least one payload");
}

at::Tensor GatherPlan::new_buffer(c10::Device device) const {
  const int64_t bytes = ranks() * packed_bytes_;
  if (options_.custom) {
    return checked_buffer(options_.custom->allocate(bytes, at::kByte, device),
                          "the custom all-gather", bytes, at::kByte, device);
  }
  if (options_.memory) return group_->allocate(bytes, at::kByte, device, *options_.memory);
  return pooled_empty(bytes, at::kByte, device);
}

at::Tensor GatherPlan::payload_view(const Piece& piece, size_t index, bool of_all_ranks) const {
  const auto& [what, offset] = piece.payloads[index];
  const auto element = static_cast<int64_t>(c10::elementSize(what.dtype));
  const int64_t from = piece.offset + offset;
  if (!of_all_ranks) {
    return typed_view(packed_, what.dtype, {what.numel}, rank() * packed_bytes_ + from);
  }
  return typed_rows(packed_, what.dtype, ranks(), what.numel, packed_bytes_ / element, from);
}

void GatherPlan::copy_in(const Piece& piece) {
  const FsdpParam& param = *piece.param;
  if (!piece.payloads.empty()) {
    c10::SmallVector<at::Tensor, 4> payloads;
    for (size_t i = 0; i < piece.payloads.size(); ++i)
      payloads.push_back(payload_view(piece, i, false));
    at::Tensor rows = param.shard_on_device();
    if (param.geometry().merged > 1) rows = rows.view(piece.shape.chunk_sizes);
    param.extension()->pack(piece.shape, rows, payloads);
    return;
  }
  const bool direct = piece.offset == kDirect;
  const at::Tensor& buffer = direct ? piece.own_part : packed_;
  const at::Tensor& source =
      sources_.emplace_back(from_rows_ ? param.shard_on_device() : piece.slice);
  if (source.numel() == 0) return;
  copies_.push_back({.from = source.const_data_ptr(),
                     .to = static_cast<char*>(buffer.data_ptr()) +
                           (direct ? 0 : rank() * packed_bytes_ + piece.offset),
                     .from_dtype = source.scalar_type(),
                     .to_dtype = from_rows_ ? param.compute_dtype() : at::kByte,
                     .row_numel = source.numel(),
                     .numel = source.numel()});
}

void GatherPlan::run_copies(const CommStreams& streams) {
  copy_batch(copies_, streams.device);
  drop_copies();
}

void GatherPlan::drop_copies() {
  copies_.clear();
  sources_.clear();
}

void GatherPlan::start(const CommStreams& streams) {
  drop_copies();
  const bool packs = packed_bytes_ > 0;
  if (ranks() == 1 && !packs) return;  // finish copies on the current stream
  {
    const StreamScope scope(options_.on_current_stream ? std::nullopt : streams.copy_in);
    if (packs) packed_ = new_buffer(streams.device);
    try {
      for (const auto& piece : pieces_) {
        if (piece.offset == kDirect && ranks() == 1) continue;
        if (piece.offset == kDirect) piece.param->full().allocate();
        copy_in(piece);
      }
    } catch (...) {  // rows that are not there: no gather runs
      packed_ = at::Tensor();
      throw;
    }
    run_copies(streams);
  }
  if (ranks() == 1) {
    if (streams.enabled()) gathered_ = StreamEvent::record(*streams.copy_in);
    return;
  }
  if (streams.enabled())
    order_streams(options_.on_current_stream ? streams.current() : *streams.copy_in,
                  *streams.all_gather);
  const StreamScope scope(streams.all_gather);
  if (packs) {
    const auto own = flat_view(packed_, {packed_bytes_}, rank() * packed_bytes_);
    works_.push_back(options_.custom ? options_.custom->run(packed_, own, *group_)
                                     : group_->all_gather_into(packed_, own));
  }
  for (const auto& piece : pieces_) {
    if (piece.offset == kDirect)
      works_.push_back(group_->all_gather_into(piece.param->full().bytes(), piece.own_part));
  }
  if (streams.enabled()) gathered_ = StreamEvent::record(*streams.all_gather);
}

void GatherPlan::finish(const CommStreams& streams) {
  drop_copies();
  for (auto& work : works_) work.wait();
  works_.clear();
  if (streams.enabled()) gathered_.make_wait(streams.current());
  for (const auto& piece : pieces_) {
    piece.param->full().allocate();
    if (piece.offset != kDirect) {
      copy_out(piece);
    } else if (ranks() == 1) {
      copy_in(piece);
    }
  }
  run_copies(streams);
  if (!streams.enabled()) packed_ = at::Tensor();
}

void GatherPlan::copy_out(const Piece& piece) {
  FsdpParam& param = *piece.param;
  if (!piece.payloads.empty()) {
    c10::SmallVector<at::Tensor, 4> payloads;
    for (size_t i = 0; i < piece.payloads.size(); ++i)
      payloads.push_back(payload_view(piece, i, true));
    const at::Tensor& whole = param.full().tensor();
    return param.extension()->unpack(
        piece.shape, payloads,
        param.geometry().merged > 1 ? whole.view(piece.shape.whole_sizes) : whole);
  }
  const at::Tensor& full = param.full().bytes();
  if (full.numel() == 0) return;
  void* first = static_cast<char*>(packed_.data_ptr()) + piece.offset;
  if (from_rows_) {
    const auto dtype = param.compute_dtype();
    const int64_t stride = packed_bytes_ / bytes_of(1, dtype);
    return add_join(copies_, param.geometry(), {first, dtype, stride}, full.data_ptr());
  }
  copies_.push_back({.from = first,
                     .to = full.data_ptr(),
                     .rows = ranks(),
                     .row_numel = piece.bytes,
                     .numel = full.numel(),
                     .from_stride = packed_bytes_,
                     .to_stride = piece.bytes});
}

void GatherPlan::keep_slices() {
  for (auto& piece : pieces_) {
    const at::Tensor& full = piece.param->full().bytes();
    const int64_t begin = std::min(rank() * piece.bytes, full.numel());
    const int64_t bytes = std::min(piece.bytes, full.numel() - begin);
    piece.slice = full.narrow(0, begin, bytes).clone();
  }
}

void GatherPlan::drop_slices() {
  for (auto& piece : pieces_) piece.slice = at::Tensor();
}

}  // namespace megashard
