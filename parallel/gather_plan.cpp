#include "parallel/gather_plan.h"

#include <algorithm>
#include <array>
#include <utility>

#include "parallel/buffer_pool.h"
#include "parallel/element_copy.h"
#include "parallel/flat_view.h"

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
  const bool direct =
      piece.payloads.empty() && options_.custom == nullptr && !options_.from_process_group &&
      (ranks() == 1 ||
       (contiguous && piece.param->full().tensor().is_cpu() && piece.bytes >= kDirectBytes));
  if (direct) {
    piece.own_part = flat_view(piece.param->full().bytes(), {piece.bytes}, rank() * piece.bytes);
  } else {
    piece.offset = packed_bytes_;
    packed_bytes_ += aligned(piece.bytes);
  }
  pieces_.push_back(std::move(piece));
}

void GatherPlan::add_extension(Piece& piece) const {
  const FsdpParam& param = *piece.param;
  const auto& geometry = param.geometry();
  piece.shape = {geometry.sizes, geometry.local_sizes(0), geometry.dim,         ranks(),
                 rank(),         param.stored_dtype(),    param.compute_dtype()};
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
  if (options_.custom) return options_.custom->allocate(bytes, at::kByte, device);
  if (options_.from_process_group) return group_->allocate(bytes, at::kByte, device);
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

void GatherPlan::copy_in(const Piece& piece) const {
  const FsdpParam& param = *piece.param;
  if (!piece.payloads.empty()) {
    c10::SmallVector<at::Tensor, 4> payloads;
    for (size_t i = 0; i < piece.payloads.size(); ++i)
      payloads.push_back(payload_view(piece, i, false));
    param.extension()->pack(piece.shape, param.shard_on_device(), payloads);
    return;
  }
  const bool direct = piece.offset == kDirect;
  const at::Tensor& buffer = direct ? piece.own_part : packed_;
  const int64_t from = direct ? 0 : rank() * packed_bytes_ + piece.offset;
  const at::Tensor& source = from_rows_ ? param.shard() : piece.slice;
  const auto from_dtype = from_rows_ ? param.stored_dtype() : at::kByte;
  const auto to_dtype = from_rows_ ? param.compute_dtype() : at::kByte;
  if (buffer.is_cpu()) {
    copy_elements(static_cast<char*>(buffer.data_ptr()) + from, to_dtype, source.const_data_ptr(),
                  from_dtype, source.numel());
  } else {
    const at::Tensor rows = from_rows_ ? param.shard_on_device() : piece.slice;
    typed_view(buffer, to_dtype, rows.sizes(), from).copy_(rows);
  }
}

void GatherPlan::start(const CommStreams& streams) {
  const bool packs = packed_bytes_ > 0;
  if (ranks() == 1 && !packs) return;  // finish copies on the current stream
  {
    const StreamScope scope(options_.on_current_stream ? std::nullopt : streams.copy_in);
    if (packs) packed_ = new_buffer(streams.device);
    for (const auto& piece : pieces_) {
      if (piece.offset == kDirect && ranks() == 1) continue;
      if (piece.offset == kDirect) piece.param->full().allocate();
      copy_in(piece);
    }
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
  if (!streams.enabled()) packed_ = at::Tensor();
}

void GatherPlan::copy_out(const Piece& piece) const {
  FsdpParam& param = *piece.param;
  if (!piece.payloads.empty()) {
    c10::SmallVector<at::Tensor, 4> payloads;
    for (size_t i = 0; i < piece.payloads.size(); ++i)
      payloads.push_back(payload_view(piece, i, true));
    return param.extension()->unpack(piece.shape, payloads, param.full().tensor());
  }
  if (!from_rows_) return copy_out_slices(piece);
  const auto& geometry = param.geometry();
  const at::Tensor& full = param.full().bytes();
  const auto element = bytes_of(1, param.compute_dtype());
  for (int from_rank = 0; from_rank < ranks(); ++from_rank) {
    const int64_t from = from_rank * packed_bytes_ + piece.offset;
    if (full.is_cpu()) {
      auto* to = static_cast<char*>(full.data_ptr());
      const auto* source = static_cast<const char*>(packed_.const_data_ptr()) + from;
      geometry.for_each_run(from_rank, [&](int64_t whole, int64_t chunk, int64_t count) {
        copy_elements(to + whole * element, at::kByte, source + chunk * element, at::kByte,
                      count * element);
      });
    } else {
      const auto sizes = geometry.local_sizes(from_rank);
      if (c10::multiply_integers(sizes) == 0) continue;
      const auto part = param.full().tensor().narrow(geometry.dim, geometry.range(from_rank).offset,
                                                     sizes[geometry.dim]);
      part.copy_(typed_view(packed_, param.compute_dtype(), sizes, from));
    }
  }
}

void GatherPlan::copy_out_slices(const Piece& piece) const {
  const at::Tensor& full = piece.param->full().bytes();
  const int64_t full_bytes = full.numel();
  for (int64_t from_rank = 0, at = 0; at < full_bytes; ++from_rank, at += piece.bytes) {
    const int64_t bytes = std::min(piece.bytes, full_bytes - at);
    const int64_t from = from_rank * packed_bytes_ + piece.offset;
    if (full.is_cpu()) {
      copy_elements(static_cast<char*>(full.data_ptr()) + at, at::kByte,
                    static_cast<const char*>(packed_.const_data_ptr()) + from, at::kByte, bytes);
    } else {
      flat_view(full, {bytes}, at).copy_(flat_view(packed_, {bytes}, from));
    }
  }
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
