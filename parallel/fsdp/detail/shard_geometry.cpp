#include "parallel/fsdp/detail/shard_geometry.h"

#include <c10/util/accumulate.h>

#include <algorithm>

#include "parallel/collectives/chunk_range.h"

namespace megashard {
namespace {

/// Box formed by `numel` consecutive indices of dimensions `sizes`; empty if they form none.
std::vector<int64_t> box_of(at::IntArrayRef sizes, int64_t numel) {
  std::vector<int64_t> box(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 0;) {
    if (numel % sizes[i] != 0) {
      if (sizes[i] % numel != 0) return {};
      box[i] = numel;
      return box;
    }
    box[i] = sizes[i];
    numel /= sizes[i];
  }
  return box;
}

/// Calls add(copy, row strides in the whole and the buffer, offsets in the whole and the buffer), all in elements: once
/// if the chunks are consecutive in the whole (dimension 0), else once per rank.
template <class Add>
void for_each_copy(const ShardGeometry& geometry, int64_t stride, Add add) {
  if (geometry.runs == 1) {
    add(RowsCopy{.rows = geometry.ranks, .row_numel = geometry.chunk_numel, .numel = geometry.numel},
        geometry.chunk_numel, stride, int64_t{0}, int64_t{0});
    return;
  }
  const int64_t chunk_run = geometry.chunk_numel / geometry.runs;
  for (int rank = 0; rank < geometry.ranks; ++rank) {
    add(RowsCopy{.rows = geometry.runs, .row_numel = chunk_run, .numel = geometry.chunk_numel},
        geometry.numel / geometry.runs, chunk_run, rank * chunk_run, rank * stride);
  }
}

const void* element_at(const void* first, int64_t index, at::ScalarType dtype) {
  return static_cast<const char*>(first) + index * static_cast<int64_t>(c10::elementSize(dtype));
}
void* element_at(void* first, int64_t index, at::ScalarType dtype) {
  return static_cast<char*>(first) + index * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace

ShardGeometry::ShardGeometry(std::vector<int64_t> whole, int64_t cut, int chunks)
    : sizes(std::move(whole)), dim(cut), ranks(chunks), numel(c10::multiply_integers(sizes)) {
  for (int64_t i = 0; i < dim && numel > 0; ++i) runs *= sizes[i];
  chunk_numel = c10::multiply_integers(local_sizes(0));
}

std::optional<ShardGeometry> ShardGeometry::of_leading(std::vector<int64_t> whole, int64_t leading, int chunks) {
  ShardGeometry geometry(std::move(whole), 0, chunks);
  if (leading == 1 || geometry.numel == 0) return geometry;
  const auto dims = at::IntArrayRef(geometry.sizes).slice(0, static_cast<size_t>(leading));
  const int64_t rows = c10::multiply_integers(dims);
  if (rows % chunks == 0) geometry.box_ = box_of(dims, rows / chunks);
  if (geometry.box_.empty()) return std::nullopt;
  geometry.merged = leading;
  geometry.chunk_numel = geometry.numel / chunks;
  return geometry;
}

std::vector<int64_t> ShardGeometry::offsets(int rank) const {
  std::vector<int64_t> offsets(sizes.size(), 0);
  if (merged == 1) {
    offsets[dim] = chunk_range(sizes[dim], ranks, rank).offset;
    return offsets;
  }
  int64_t row = rank * c10::multiply_integers(box_);
  for (auto i = static_cast<size_t>(merged); i-- > 0;) {
    offsets[i] = row % sizes[i];
    row /= sizes[i];
  }
  return offsets;
}

std::vector<int64_t> ShardGeometry::local_sizes(int rank) const {
  auto local = sizes;
  if (merged == 1) {
    local[dim] = chunk_range(sizes[dim], ranks, rank).size;
  } else {
    std::copy(box_.begin(), box_.end(), local.begin());
  }
  return local;
}

std::vector<int64_t> ShardGeometry::as_cut(std::vector<int64_t> whole_or_chunk) const {
  const auto second = whole_or_chunk.begin() + 1;
  for (auto i = second; i != second + (merged - 1); ++i) whole_or_chunk.front() *= *i;
  whole_or_chunk.erase(second, second + (merged - 1));
  return whole_or_chunk;
}

void add_chunk_cat(std::vector<RowsCopy>& copies, const ShardGeometry& geometry, const void* whole,
                   at::ScalarType dtype, const ChunkBuffer& chunks) {
  if (whole == nullptr) {
    copies.push_back({.to = chunks.first,
                      .from_dtype = chunks.dtype,
                      .to_dtype = chunks.dtype,
                      .rows = geometry.ranks,
                      .row_numel = geometry.chunk_numel,
                      .to_stride = chunks.stride,
                      .zero_rest = true});
    return;
  }
  for_each_copy(geometry, chunks.stride,
                [&](RowsCopy copy, int64_t whole_stride, int64_t chunk_stride, int64_t in_whole, int64_t in_chunks) {
                  copy.from = element_at(whole, in_whole, dtype);
                  copy.to = element_at(chunks.first, in_chunks, chunks.dtype);
                  copy.from_dtype = dtype;
                  copy.to_dtype = chunks.dtype;
                  copy.from_stride = whole_stride;
                  copy.to_stride = chunk_stride;
                  copy.zero_rest = true;
                  copies.push_back(copy);
                });
}

void add_copy_out(std::vector<RowsCopy>& copies, const ShardGeometry& geometry, const ChunkBuffer& chunks,
                  void* whole) {
  for_each_copy(geometry, chunks.stride,
                [&](RowsCopy copy, int64_t whole_stride, int64_t chunk_stride, int64_t in_whole, int64_t in_chunks) {
                  copy.from = element_at(chunks.first, in_chunks, chunks.dtype);
                  copy.to = element_at(whole, in_whole, chunks.dtype);
                  copy.from_dtype = copy.to_dtype = chunks.dtype;
                  copy.from_stride = chunk_stride;
                  copy.to_stride = whole_stride;
                  copies.push_back(copy);
                });
}

}  // namespace megashard
