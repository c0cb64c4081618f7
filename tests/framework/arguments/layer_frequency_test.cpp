#include "framework/arguments/layer_frequency.h"

#include <gtest/gtest.h>

#include "framework/diagnostics.h"

namespace megashard {
namespace {

using Layers = std::vector<bool>;

TEST(LayerFrequency, IsAnInterval) {
  EXPECT_EQ(expand_layer_frequency("1", 3), Layers({true, true, true}));
  EXPECT_EQ(expand_layer_frequency("2", 5), Layers({true, false, true, false, true}));
}

TEST(LayerFrequency, IsAPythonList) {
  EXPECT_EQ(expand_layer_frequency("[0]*2+[1]*3", 5), Layers({false, false, true, true, true}));
  EXPECT_EQ(expand_layer_frequency("([0, 1] * 2 + [1])", 5), Layers({false, true, false, true, true}));
  EXPECT_EQ(expand_layer_frequency("([0]*1+[1])*2", 4), Layers({false, true, false, true}));
}

TEST(LayerFrequency, ThatCannotBeReadIsAnError) {
  for (const char* wrong : {"", "0", "-1", "[2]", "[1]*0", "[1", "[1]*", "[1]+", "([1]", "[1] 2", "[]", "one",
                            "[1]*99999999999999999999", "[1]*100000*100000"})
    EXPECT_THROW(expand_layer_frequency(wrong, 1), UsageError) << wrong;
  EXPECT_THROW(expand_layer_frequency("[1]*3", 4), UsageError);
}

}  // namespace
}  // namespace megashard
