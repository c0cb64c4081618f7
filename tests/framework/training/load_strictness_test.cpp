#include "framework/training/loaded_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "framework/arguments/argument_table.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const LoadReport kMissing{.missing = {"model.new"}, .unexpected = {}};
const LoadReport kUnexpected{.missing = {}, .unexpected = {"model.old"}};

std::vector<std::string> judged(const LoadReport& report, const std::string& value) {
  Arguments arguments;
  set_option(*find_option("--dist-ckpt-strictness"), std::vector{value}, arguments);
  return judge_differences(report, load_strictness(arguments.dist_ckpt_strictness), "F");
}

bool refuses(const LoadReport& report, const std::string& value) {
  try {
    judged(report, value);
  } catch (const UsageError&) {
    return true;
  }
  return false;
}

TEST(LoadStrictness, IsThatOfMegatronsValues) {
  EXPECT_THAT(usage_error([] { judge_differences(kMissing, load_strictness({}), "F"); }),
              HasSubstr("F does not fit this run; missing keys (1): model.new"));
  EXPECT_TRUE(refuses(kMissing, "raise_all") && refuses(kUnexpected, "raise_all"));
  for (const auto* value : {"assume_ok_unexpected", "raise_unexpected"}) {
    EXPECT_TRUE(refuses(kMissing, value)) << value;
    EXPECT_THAT(judged(kUnexpected, value), IsEmpty()) << value;
  }
  for (const auto* value : {"log_unexpected", "return_unexpected"}) {
    EXPECT_THAT(judged(kMissing, value), ElementsAre(HasSubstr("missing keys (1): model.new")));
    EXPECT_THAT(judged(kUnexpected, value), IsEmpty()) << value;
  }
  for (const auto* value : {"log_all", "return_all"}) {
    EXPECT_THAT(judged(kMissing, value), ElementsAre(HasSubstr("missing keys (1): model.new")));
    EXPECT_THAT(judged(kUnexpected, value), ElementsAre(HasSubstr("keys (1): model.old")));
  }
  EXPECT_THAT(judged(kMissing, "ignore_all"), IsEmpty());
  EXPECT_THAT(judged(kUnexpected, "ignore_all"), IsEmpty());
  EXPECT_THAT(usage_error([] { judged(kMissing, "loose"); }), HasSubstr("got \"loose\""));
}

TEST(LoadStrictness, NamesTheRemedyThatFits) {
  const LoadReport optimizer{.missing = {"optimizer.state.w.exp_avg"}, .unexpected = {}};
  EXPECT_THAT(usage_error([&] { judged(optimizer, "raise_all"); }), HasSubstr("--no-load-optim"));
  EXPECT_THAT(usage_error([&] { judged(kMissing, "raise_all"); }), Not(HasSubstr("--no-load-optim")));
}

}  // namespace
}  // namespace megashard
