#include "parallel/sequence_parallel/sequence_shard.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using RowNumbers = std::vector<int64_t>;

at::Tensor on_host(const RowNumbers& rows) { return at::tensor(rows, at::kLong).cpu(); }

/// Rows of each of four ranks for 16 rows.
void expect_rows(int64_t ring, const std::vector<RowNumbers>& expected) {
  run_ranks(4, [&](const ProcessGroupPtr& world) {
    const SequenceShard shard = share_sequences(world, ring).with_length(16);
    const at::Tensor whole = at::arange(16, at::kLong);
    const at::Tensor mine = shard.rows_of(whole, 0);
    EXPECT_TRUE(at::equal(mine.cpu(), on_host(expected[static_cast<size_t>(world->rank())]))) << mine;
    EXPECT_EQ(shard.rows(), 4);
    EXPECT_TRUE(at::equal(whole_of_rows(mine.unsqueeze(0), 1, shard), whole.unsqueeze(0)));
  });
}

TEST(SequenceShard, RowsInRankOrderWithoutARing) {
  expect_rows(1, {{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}});
}

TEST(SequenceShard, ARingHasAnEarlyAndALateChunkOnEachRank) {
  expect_rows(4, {{0, 1, 14, 15}, {2, 3, 12, 13}, {4, 5, 10, 11}, {6, 7, 8, 9}});
}

TEST(SequenceShard, RanksOfAPlaceDivideItsRows) {
  expect_rows(2, {{0, 1, 2, 3}, {12, 13, 14, 15}, {4, 5, 6, 7}, {8, 9, 10, 11}});
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const SequenceShard shard = share_sequences(world, 2).with_length(16);
    EXPECT_EQ(shard.place->ranks(), (world->rank() < 2 ? std::vector{0, 1} : std::vector{2, 3}));
    EXPECT_EQ(shard.ring->group->ranks(), (world->rank() % 2 == 0 ? std::vector{0, 2} : std::vector{1, 3}));
    const RowNumbers of_place =
        world->rank() < 2 ? RowNumbers{0, 1, 2, 3, 12, 13, 14, 15} : RowNumbers{4, 5, 6, 7, 8, 9, 10, 11};
    EXPECT_TRUE(at::equal(shard.of_place().rows_of(on_host(of_place), 0).cpu(),
                          shard.rows_of(at::arange(16, at::kLong), 0).cpu()));
  });
}

TEST(SequenceShard, ThreeRanksOfAPlaceDivideAcrossItsChunks) {
  run_ranks(6, [](const ProcessGroupPtr& world) {
    const SequenceShard shard = share_sequences(world, 2).with_length(24);  // chunks of 6, 4 rows per rank
    const at::Tensor mine = shard.rows_of(at::arange(24, at::kLong), 0);
    if (world->rank() == 1) {
      EXPECT_TRUE(at::equal(mine.cpu(), on_host({4, 5, 18, 19}))) << mine;
    }
    EXPECT_TRUE(at::equal(whole_of_rows(mine, 0, shard), at::arange(24, at::kLong)));
  });
}

TEST(SequenceShard, LengthsAndRingsThatDoNotDivideAreNamed) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const SequenceShard ring = share_sequences(world, 2);
    EXPECT_EQ(ring.length_multiple(), 4);
    EXPECT_THAT(message_of([&] { ring.with_length(10).rows_of(at::arange(10), 0); }),
                HasSubstr("a sequence of 10 tokens cannot lie on 2 ranks in a ring: choose a length that is a multiple "
                          "of 4"));
    EXPECT_THAT(message_of([&] { share_sequences(world, 3); }),
                HasSubstr("a ring of 3 places does not divide the 2 ranks of a sequence"));
    EXPECT_EQ(share_sequences(world, 1).ring, nullptr);
    EXPECT_TRUE(share_sequences(nullptr, 1).is_whole());
  });
}

}  // namespace
}  // namespace megashard
