#include "parallel/fsdp/shard_copies.h"

namespace megashard {
namespace {

/// Calls add(copy, place of its first row in the whole, place in the buffer), places in elements:
/// once for dimension 0, where the chunks follow one another in the whole, and else once a rank.
template <class Add>
void for_each_copy(const ShardGeometry& geometry, int64_t stride, Add add) {
  if (geometry.runs == 1) {
    add(
        RowsCopy{
            .rows = geometry.ranks, .row_numel = geometry.chunk_numel, .numel = geometry.numel},
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

void add_split(std::vector<RowsCopy>& copies, const ShardGeometry& geometry, const void* whole,
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
                [&](RowsCopy copy, int64_t whole_stride, int64_t chunk_stride, int64_t in_whole,
                    int64_t in_chunks) {
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

void add_join(std::vector<RowsCopy>& copies, const ShardGeometry& geometry,
              const ChunkBuffer& chunks, void* whole) {
  for_each_copy(geometry, chunks.stride,
                [&](RowsCopy copy, int64_t whole_stride, int64_t chunk_stride, int64_t in_whole,
                    int64_t in_chunks) {
                  copy.from = element_at(chunks.first, in_chunks, chunks.dtype);
                  copy.to = element_at(whole, in_whole, chunks.dtype);
                  copy.from_dtype = copy.to_dtype = chunks.dtype;
                  copy.from_stride = chunk_stride;
                  copy.to_stride = whole_stride;
                  copies.push_back(copy);
                });
}

}  // namespace megashard
