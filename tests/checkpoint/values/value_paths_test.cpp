#include "checkpoint/values/value_paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>

#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

Dict dict_of(std::initializer_list<std::pair<const char*, Value>> entries) {
  Dict dict;
  for (const auto& [name, value] : entries) dict.set(name, value);
  return dict;
}

FlatValue leaf(std::vector<Value> path, Value value) {
  return {"k" + std::to_string(path.size()), std::move(path), std::move(value)};
}

std::string refusal(std::vector<FlatValue> leaves, size_t keys) {
  return message_of([&] { nest_values(std::move(leaves), keys); });
}

TEST(NestValues, UndoesFlatten) {
  const Dict group = dict_of({{"lr", 0.5}, {"params", List{{"a", "b"}}}});
  const Dict nested = dict_of({{"args", dict_of({{"none", Value()}, {"deep", dict_of({{"x", 1}})}})},
                               {"groups", List{{group, dict_of({{"lr", 1.5}}), List{{dict_of({{"y", 2}})}}}}},
                               {"plain", Tuple{{1, 2}}}});
  const auto flat = flatten_values(nested);
  EXPECT_EQ(nest_values(flat, flat.size()), nested);
}

TEST(NestValues, ListsTakeTheirItemsInAnyOrder) {
  std::vector<FlatValue> leaves;
  for (const int64_t index : {2, 0, 1}) leaves.push_back(leaf({"a", index}, index * 10));
  EXPECT_EQ(nest_values(leaves, 3), dict_of({{"a", List{{0, 10, 20}}}}));
}

TEST(NestValues, WhatIsLeftOutOfAListIsNone) {
  EXPECT_EQ(nest_values({leaf({"a", int64_t{2}, "x"}, 1)}, 3),
            dict_of({{"a", List{{Value(), Value(), dict_of({{"x", 1}})}}}}));
  EXPECT_EQ(nest_values({}, 0), Dict());
}

TEST(NestValues, ListsAreNoLongerThanTheKeysCanFill) {
  EXPECT_THAT(refusal({leaf({"a", int64_t{1} << 40}, 1), leaf({"b"}, 1)}, 2),
              HasSubstr("key k2 has the list index 1099511627776, and the checkpoint has 2 keys"));
  EXPECT_THAT(refusal({leaf({"a", int64_t{-1}}, 1)}, 1), HasSubstr("the list index -1"));
  // Many lists, each with the maximum number of gaps.
  std::vector<FlatValue> leaves;
  for (int64_t i = 0; i < 100; ++i) leaves.push_back(leaf({std::to_string(i), int64_t{99}}, 1));
  EXPECT_THAT(refusal(std::move(leaves), 100), HasSubstr("lack 198 items, and it has 100 keys"));
}

TEST(NestValues, PathsThatContradictEachOtherAreRefused) {
  EXPECT_THAT(refusal({leaf({"a"}, 1), leaf({"a", "b"}, 1)}, 2),
              HasSubstr("key k2 lies inside another one, which is an int"));
  EXPECT_NE(refusal({leaf({"a", "b"}, 1), leaf({"a", int64_t{0}}, 1)}, 2), "");
  EXPECT_NE(refusal({leaf({"a", int64_t{0}}, 1), leaf({"a", "b"}, 1)}, 2), "");
  EXPECT_THAT(refusal({leaf({int64_t{0}}, 1)}, 1), HasSubstr("begins with an int"));
  EXPECT_THAT(refusal({leaf({}, 1)}, 1), HasSubstr("nested 0 deep"));
  EXPECT_THAT(refusal({leaf(std::vector<Value>(100, "a"), 1)}, 1), HasSubstr("nested 100 deep"));
}

TEST(NestValues, ALargeDictTakesNoTimeToSpeakOf) {
  constexpr int64_t kNames = 200'000;  // would take a minute if each name were searched for among all others
  std::vector<FlatValue> leaves;
  for (int64_t i = 0; i < kNames; ++i) leaves.push_back(leaf({"a", std::to_string(i)}, i));
  const auto begin = std::clock();  // CPU time of this process
  const auto nested = nest_values(std::move(leaves), kNames);
  EXPECT_LT(std::clock() - begin, 15 * CLOCKS_PER_SEC);
  EXPECT_EQ(nested.at("a").as_dict().entries.size(), static_cast<size_t>(kNames));
}

}  // namespace
}  // namespace megashard
