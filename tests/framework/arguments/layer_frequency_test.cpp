#include "framework/arguments/layer_frequency.h"

#include <gtest/gtest.h>

#include "framework/arguments/network_arguments.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

using Layers = std::vector<bool>;

Layers experts_of(const std::string& frequency, int64_t layers) {
  return expand_layer_frequency(kMoeLayerFreq, frequency, layers);
}

TEST(LayerFrequency, IsAnInterval) {
  EXPECT_EQ(experts_of("1", 3), Layers({true, true, true}));
  EXPECT_EQ(experts_of("2", 5), Layers({true, false, true, false, true}));
}

TEST(LayerFrequency, SelectsTheFirstTheLastOrAllButTheLastOfAnInterval) {
  EXPECT_EQ(expand_layer_frequency(kNoRopeFreq, "3", 7), Layers({false, false, true, false, false, true, false}));
  EXPECT_EQ(expand_layer_frequency(kWindowAttnSkipFreq, "3", 4), Layers({true, true, false, true}));
  EXPECT_EQ(expand_layer_frequency(kWindowAttnSkipFreq, "[1,0]", 2), Layers({true, false}));
}

TEST(LayerFrequency, IsAPythonList) {
  EXPECT_EQ(experts_of("[0]*2+[1]*3", 5), Layers({false, false, true, true, true}));
  EXPECT_EQ(experts_of("([0, 1] * 2 + [1])", 5), Layers({false, true, false, true, true}));
  EXPECT_EQ(experts_of("([0]*1+[1])*2", 4), Layers({false, true, false, true}));
}

TEST(LayerFrequency, ThatCannotBeReadIsAnError) {
  for (const char* wrong : {"", "0", "-1", "[2]", "[1]*0", "[1", "[1]*", "[1]+", "([1]", "[1] 2", "[]", "one",
                            "[1]*99999999999999999999", "[1]*100000*100000"})
    EXPECT_THROW(experts_of(wrong, 1), UsageError) << wrong;
  EXPECT_THROW(experts_of("[1]*3", 4), UsageError);
}

TEST(WindowSize, HasTheKeysBeforeAQuery) {
  EXPECT_EQ(keys_before("127,0"), 127);
  EXPECT_EQ(keys_before("(0, 0)"), 0);
  for (const char* wrong : {"", "127", "127,1", "-1,0", "(127,0", "127,0)", "127 0", "x,0"})
    EXPECT_THROW(keys_before(wrong), UsageError) << wrong;
}

}  // namespace
}  // namespace megashard
