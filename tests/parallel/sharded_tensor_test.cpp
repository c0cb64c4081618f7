#include "parallel/sharded_tensor.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace megashard {
namespace {

TEST(ChunkRange, IsTorchChunk) {
  for (int64_t length = 1; length < 20; ++length) {
    for (int64_t parts = 1; parts < 9; ++parts) {
      const std::vector<at::Tensor> chunks = at::empty({length}).chunk(parts);
      int64_t next = 0;
      for (int64_t i = 0; i < parts; ++i) {
        const ChunkRange range = chunk_range(length, parts, i);
        const auto index = static_cast<size_t>(i);
        EXPECT_EQ(range.size, index < chunks.size() ? chunks[index].size(0) : 0) << length << " in " << parts;
        EXPECT_EQ(range.offset, next);
        next += range.size;
      }
      EXPECT_EQ(next, length);
    }
  }
}

TEST(ChunkRange, EmptyPiecesLieAtTheEnd) {
  EXPECT_EQ(chunk_range(5, 4, 2).size, 1);
  EXPECT_EQ(chunk_range(5, 4, 3).offset, 5);
  EXPECT_EQ(chunk_range(5, 4, 3).size, 0);
  EXPECT_EQ(chunk_range(0, 2, 1).offset, 0);
  EXPECT_THROW(chunk_range(5, 4, 4), c10::Error);
}

TEST(ShardedTensor, ReplicatedIsTheWhole) {
  const ShardedTensor tensor = ShardedTensor::replicated(at::empty({2, 3}));
  EXPECT_TRUE(tensor.is_replicated());
  EXPECT_EQ(tensor.global_sizes, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(tensor.offsets, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(ShardedTensor::replicated(at::empty({})).offsets.size(), 0u);
}

}  // namespace
}  // namespace megashard
