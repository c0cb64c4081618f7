#include "parallel/fsdp/shard_geometry.h"

#include <c10/util/accumulate.h>

#include <algorithm>

namespace megashard {
namespace {

/// The box of `numel` consecutive indices of dimensions `sizes`; empty if they make none.
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

}  // namespace

ShardGeometry::ShardGeometry(std::vector<int64_t> whole, int64_t cut, int parts)
    : sizes(std::move(whole)), dim(cut), ranks(parts), numel(c10::multiply_integers(sizes)) {
  for (int64_t i = 0; i < dim && numel > 0; ++i) runs *= sizes[i];
  chunk_numel = c10::multiply_integers(local_sizes(0));
}

std::optional<ShardGeometry> ShardGeometry::of_leading(std::vector<int64_t> whole, int64_t leading,
                                                       int parts) {
  ShardGeometry geometry(std::move(whole), 0, parts);
  if (leading == 1 || geometry.numel == 0) return geometry;
  const auto dims = at::IntArrayRef(geometry.sizes).slice(0, static_cast<size_t>(leading));
  const int64_t rows = c10::multiply_integers(dims);
  if (rows % parts == 0) geometry.box_ = box_of(dims, rows / parts);
  if (geometry.box_.empty()) return std::nullopt;
  geometry.merged = leading;
  geometry.chunk_numel = geometry.numel / parts;
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

}  // namespace megashard
