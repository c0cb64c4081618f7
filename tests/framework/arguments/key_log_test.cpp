#include "framework/arguments/key_log.h"

#include <gtest/gtest.h>

#include "framework/arguments/argument_table.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

const std::string kFile = "run.yaml";

TEST(KeyLog, ReadKeysHaveTheArgumentsThatTheySet) {
  const YAML::Node root = YAML::Load("lr: 0.25\nseed: 1234\nother: [a, b]\n");
  Arguments arguments;
  KeyLog log;
  const auto take = [&](const char* key, const char* flag) {
    const YamlValue value{kFile, key, root[key]};
    take_key(&log, value, arguments, [&] { set_option(*find_option(flag), value, arguments); });
  };
  take("lr", "--lr");
  take("seed", "--seed");
  const YamlValue other{kFile, "other", root["other"]};
  take_key(&log, other, arguments, [] {});
  ASSERT_EQ(log.size(), 3);
  EXPECT_EQ(log[0].text, "--lr 0.25");
  EXPECT_EQ(log[0].line, 1);
  EXPECT_EQ(log[1].text, "--seed 1234") << "given, though it is the default";
  EXPECT_EQ(log[2].text, "[a, b]") << "no argument: as written";
  EXPECT_EQ(arguments.given.at("lr"), "run.yaml:1");
}

TEST(KeyLog, RefusedKeysAreNotedAndThrownOn) {
  const YAML::Node root = YAML::Load("seed: many\n");
  const YamlValue value{kFile, "seed", root["seed"]};
  Arguments arguments;
  KeyLog log;
  const auto take = [&](KeyLog* to) { take_key(to, value, arguments, [&] { value.integer(0); }); };
  EXPECT_THROW(take(&log), UsageError);
  ASSERT_EQ(log.size(), 1);
  EXPECT_EQ(log[0].use, KeyNote::Use::kRefused);
  EXPECT_EQ(log[0].text, "seed takes a whole number of at least 0, got \"many\".") << "without the place";
  EXPECT_THROW(take(nullptr), UsageError);
  leave_key(&log, value, "nothing reads it");
  EXPECT_EQ(log[1].use, KeyNote::Use::kIgnored);
}

}  // namespace
}  // namespace megashard
