#include "parallel/device/range_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>

namespace megashard {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

TEST(RangeAllocator, TakesTheSmallestFreePartThatHoldsIt) {
  RangeAllocator range;
  const size_t large = range.take(100 * kMiB), between = range.take(kMiB), small = range.take(50 * kMiB);
  range.take(kMiB);
  const size_t end = range.end();
  range.give_back(large, 100 * kMiB);
  range.give_back(small, 50 * kMiB);
  EXPECT_EQ(range.take(40 * kMiB), small);
  EXPECT_EQ(range.take(40 * kMiB), large);
  EXPECT_EQ(range.take(60 * kMiB), large + 40 * kMiB);
  EXPECT_LT(between, small);
  EXPECT_EQ(range.end(), end);
}

TEST(RangeAllocator, FreePartsBecomeOneOnBothSides) {
  RangeAllocator range;
  const size_t a = range.take(20 * kMiB), b = range.take(20 * kMiB), c = range.take(20 * kMiB);
  range.take(64);
  for (const size_t offset : {a, c, b}) range.give_back(offset, 20 * kMiB);
  EXPECT_EQ(range.take(60 * kMiB), a);
}

TEST(RangeAllocator, WhatJustCameBackIsTakenAgainAsItIs) {
  RangeAllocator range;
  const size_t a = range.take(2 * kMiB), b = range.take(2 * kMiB), c = range.take(2 * kMiB);
  range.give_back(c, 2 * kMiB);
  range.give_back(a, 2 * kMiB);
  range.give_back(b, 2 * kMiB);
  EXPECT_EQ(range.take(2 * kMiB), b);
  EXPECT_EQ(range.take(2 * kMiB), a);
}

TEST(RangeAllocator, JoinsAllBeforeItGrows) {
  RangeAllocator range;
  const size_t a = range.take(2 * kMiB), b = range.take(2 * kMiB);
  range.give_back(a, 2 * kMiB);
  range.give_back(b, 2 * kMiB);
  EXPECT_EQ(range.take(3 * kMiB), a);
  range.give_back(a, 3 * kMiB);
  EXPECT_EQ(range.take(6 * kMiB), a);  // its free end grows
  EXPECT_EQ(range.end(), 6 * kMiB);
}

TEST(RangeAllocator, PartsNeverOverlap) {
  RangeAllocator range;
  std::mt19937 random(7);
  std::map<size_t, size_t> held;  // bytes by offset
  size_t live = 0, most = 0;
  for (int step = 0; step < 20000; ++step) {
    if (live < 400 * kMiB && random() % 2 == 0) {
      const size_t bytes = 1 + random() % (8 * kMiB);
      const size_t offset = range.take(bytes);
      const auto next = held.lower_bound(offset);
      ASSERT_TRUE(next == held.end() || offset + bytes <= next->first);
      ASSERT_TRUE(next == held.begin() || std::prev(next)->first + std::prev(next)->second <= offset);
      ASSERT_EQ(offset % 64, 0);
      ASSERT_LE(offset + bytes, range.end());
      held.emplace(offset, bytes);
      most = std::max(most, live += bytes);
    } else if (!held.empty()) {
      const auto part = std::next(held.begin(), static_cast<std::ptrdiff_t>(random() % held.size()));
      range.give_back(part->first, part->second);
      live -= part->second;
      held.erase(part);
    }
  }
  EXPECT_LT(range.end(), 2 * most);
  for (const auto& [offset, bytes] : held) range.give_back(offset, bytes);
  const size_t end = range.end();
  EXPECT_EQ(range.take(end), 0);
  EXPECT_EQ(range.end(), end);
}

}  // namespace
}  // namespace megashard
