#include "framework/training/random_states.h"

#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include "checkpoint/values/value_tensors.h"
#include "framework/recompute/generator_state.h"

namespace megashard {
namespace {

TEST(RandomStates, GoOnWhereTheyWere) {
  seed_random_states(3, c10::kCPU);
  at::rand({5});
  const Dict states = random_states(c10::kCPU);
  const auto drawn = at::rand({1000});
  seed_random_states(4, c10::kCPU);
  EXPECT_FALSE(at::equal(at::rand({1000}), drawn));
  ASSERT_TRUE(restore_random_states(states, c10::kCPU));
  EXPECT_TRUE(at::equal(at::rand({1000}), drawn));
}

TEST(RandomStates, MayBeTensors) {  // as torch.get_rng_state() gives them to Megatron
  seed_random_states(3, c10::kCPU);
  Dict states;
  states.set("random_rng_state", Tuple{{3, Tuple{{1, 2}}, Value()}});
  states.set("torch_rng_state",
             tensor_value(generator_state(at::globalContext().defaultGenerator(c10::kCPU))));
  const auto drawn = at::rand({10});
  ASSERT_TRUE(restore_random_states(states, c10::kCPU));
  EXPECT_TRUE(at::equal(at::rand({10}), drawn));
}

TEST(RandomStates, OfOtherDevicesChangeNothing) {
  seed_random_states(3, c10::kCPU);
  Dict other;
  other.set("cuda_rng_state", Bytes{std::string(16, 'x')});
  EXPECT_FALSE(restore_random_states(other, c10::kCPU));
  other.set("torch_rng_state", Bytes{std::string(16, 'x')});  // a GPU's is so short
  EXPECT_FALSE(restore_random_states(other, c10::kCPU));
  const auto drawn = at::rand({10});
  seed_random_states(3, c10::kCPU);
  EXPECT_TRUE(at::equal(at::rand({10}), drawn));
}

}  // namespace
}  // namespace megashard
