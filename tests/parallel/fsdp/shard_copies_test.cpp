#include "parallel/fsdp/detail/shard_geometry.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

namespace megashard {
namespace {

/// Copies `whole` in bf16 into chunks with three elements between them, and back.
void expect_round_trip(const std::vector<int64_t>& sizes, int64_t dim, int ranks) {
  const ShardGeometry geometry(sizes, dim, ranks);
  const at::Tensor whole = at::arange(1, geometry.numel + 1, at::kFloat).view(sizes);
  const int64_t stride = geometry.chunk_numel + 3;
  const at::Tensor buffer = at::full({ranks, stride}, -1, at::kBFloat16);
  const ChunkBuffer chunks{buffer.data_ptr(), at::kBFloat16, stride};
  std::vector<RowsCopy> copies;
  add_chunk_cat(copies, geometry, whole.const_data_ptr(), at::kFloat, chunks);
  copy_batch(copies, c10::kCPU);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto rows = chunk_range(sizes[dim], ranks, rank);
    const at::Tensor expected = at::full({stride}, -1, at::kBFloat16);
    expected.narrow(0, 0, geometry.chunk_numel).zero_();
    const at::Tensor chunk = whole.narrow(dim, rows.offset, rows.size).reshape({-1});
    expected.narrow(0, 0, chunk.numel()).copy_(chunk);
    EXPECT_TRUE(at::equal(buffer[rank], expected)) << "rank " << rank;
  }
  const at::Tensor again = at::zeros_like(whole, at::kBFloat16);
  copies.clear();
  add_copy_out(copies, geometry, chunks, again.data_ptr());
  copy_batch(copies, c10::kCPU);
  EXPECT_TRUE(at::equal(again, whole.to(at::kBFloat16)));
}

TEST(ShardCopies, TakeAWholeApartAndPutItTogether) {
  expect_round_trip({8, 3}, 0, 4);
  expect_round_trip({7, 3}, 0, 3);  // the last rank has one row of three
  expect_round_trip({5}, 0, 4);     // the last rank has none
  expect_round_trip({3, 8}, 1, 4);
  expect_round_trip({2, 6, 5}, 1, 2);
  expect_round_trip({4, 4}, 0, 1);
}

TEST(ShardCopies, AGradientThatIsMissingIsZero) {
  const ShardGeometry geometry({5, 2}, 0, 2);
  const at::Tensor buffer = at::full({2, 7}, -1, at::kFloat);
  std::vector<RowsCopy> copies;
  add_chunk_cat(copies, geometry, nullptr, at::kBFloat16, {buffer.data_ptr(), at::kFloat, 7});
  copy_batch(copies, c10::kCPU);
  EXPECT_EQ(buffer.sum().item<float>(), -2);  // bytes after the chunks are unchanged
}

}  // namespace
}  // namespace megashard
