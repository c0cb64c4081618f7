#include "framework/modules/megatron_module.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Forgetful : MegatronModule {
  Forgetful() {
    register_parameter("a", at::zeros({2, 3}));
    register_parameter("b", at::zeros({4}));
    register_parameter("c", at::zeros({5}));
  }
  ShardedTensors state_dict_for_save_checkpoint() override {
    auto entries = state_dict();
    if (is_right) return entries;
    entries[1].second = ShardedTensor::replicated(at::zeros({4}, at::kBFloat16));
    entries[2].first = "d";
    return entries;
  }
  bool is_right = true;
};

TEST(SaveContract, WhatIsSavedIsWhatIsLoaded) {
  Forgetful model;
  EXPECT_EQ(checked_state_dict(model).size(), 3U);
  model.is_right = false;
  EXPECT_THAT(testing::message_of([&] { checked_state_dict(model); }),
              AllOf(HasSubstr("b is saved as bfloat16[4] and loaded as float32[4]"),
                    HasSubstr("d float32[5] is only saved"), HasSubstr("c float32[5] is not saved")));
}

}  // namespace
}  // namespace megashard
