#include "framework/data/conversation_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(SequencePacking, EachGoesWhereTheLeastRoomIsLeft) {
  const std::vector<int64_t> lengths = {5, 6, 3, 2, 8, 2, 2};
  EXPECT_THAT(pack_sequences(lengths, 8),
              ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3), ElementsAre(4), ElementsAre(5, 6)))
      << "3 fits behind 5 and not behind 6";
  EXPECT_THAT(pack_sequences(std::vector<int64_t>{4, 4, 2}, 6), ElementsAre(ElementsAre(0, 2), ElementsAre(1)))
      << "of rows with as much room the earlier";
  EXPECT_THAT(pack_sequences({}, 8), IsEmpty());
}

TEST(SequencePacking, WholeSequencesEachOnceInNearlyFullRows) {
  std::mt19937 random(3);
  std::vector<int64_t> lengths(2000);
  for (auto& length : lengths) length = 1 + static_cast<int64_t>(random() % 600);
  std::vector<int64_t> seen;
  int64_t tokens = 0;
  const auto rows = pack_sequences(lengths, 1024);
  for (const auto& row : rows) {
    int64_t taken = 0;
    for (const int64_t i : row) taken += lengths[static_cast<size_t>(i)];
    EXPECT_LE(taken, 1024);
    EXPECT_TRUE(std::ranges::is_sorted(row));
    seen.insert(seen.end(), row.begin(), row.end());
    tokens += taken;
  }
  std::ranges::sort(seen);
  for (size_t i = 0; i < lengths.size(); ++i) ASSERT_EQ(seen.at(i), static_cast<int64_t>(i));
  EXPECT_EQ(seen.size(), lengths.size());
  EXPECT_GT(static_cast<double>(tokens) / static_cast<double>(1024 * rows.size()), 0.95);
}

}  // namespace
}  // namespace megashard
