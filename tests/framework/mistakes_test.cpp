#include "framework/mistakes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::ElementsAre;

TEST(UsageErrors, OneIsAnErrorAndSeveralAreLines) {
  EXPECT_STREQ(UsageErrors({"b is wrong."}).what(), "b is wrong.");
  const UsageErrors several({"b is wrong.", "a is wrong.", "b is wrong."});
  EXPECT_STREQ(several.what(), "2 things must change:\n  a is wrong.\n  b is wrong.");
  EXPECT_THAT(several.messages(), ElementsAre("a is wrong.", "b is wrong."));
}

TEST(Mistakes, CollectWhatStepsThrow) {
  Mistakes mistakes;
  EXPECT_TRUE(mistakes.attempt([] {}));
  EXPECT_TRUE(mistakes.none());
  mistakes.throw_if_any();
  EXPECT_FALSE(mistakes.attempt([] { throw UsageErrors({"c.", "b."}); }));
  EXPECT_FALSE(mistakes.attempt([] { throw UsageError("a."); }));
  EXPECT_THROW(mistakes.attempt([] { throw std::runtime_error("a failure"); }), std::runtime_error);
  EXPECT_EQ(usage_error([&] { mistakes.throw_if_any(); }), "3 things must change:\n  a.\n  b.\n  c.");
  EXPECT_EQ(usage_error([&] { mistakes.attempt_or_throw([] { throw UsageError("d."); }); }),
            "4 things must change:\n  a.\n  b.\n  c.\n  d.");
}

// --lr fast: that --lr is missing would only follow.
TEST(Mistakes, RulesThatMayOnlyFollowAreLeftOut) {
  Mistakes mistakes;
  mistakes.add("--lr takes a number.", {"--lr"});
  EXPECT_FALSE(mistakes.require(false, "--lr is missing."));
  EXPECT_FALSE(mistakes.require(false, "the rate is missing (--lr)."));
  EXPECT_FALSE(mistakes.require(false, "--min-lr is missing."));
  EXPECT_FALSE(mistakes.require(false, "--lr-decay-iters is missing."));
  EXPECT_TRUE(mistakes.require(true, "--save is missing."));
  EXPECT_EQ(usage_error([&] { mistakes.throw_if_any(); }),
            "3 things must change:\n  --lr takes a number.\n  --lr-decay-iters is missing.\n  "
            "--min-lr is missing.");
}

}  // namespace
}  // namespace megashard
