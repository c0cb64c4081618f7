#include "framework/training/random_states.h"

#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "checkpoint/values/value_tensors.h"
#include "framework/recompute/call_state.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

/// What the host and the device of the tests draw next.
std::vector<at::Tensor> draw(int64_t count) {
  std::vector<at::Tensor> drawn;
  for (const auto device : {c10::Device(c10::kCPU), testing::device_of_tests()})
    drawn.push_back(at::rand({count}, at::TensorOptions(device)).cpu());
  return drawn;
}

void expect_drawn(const std::vector<at::Tensor>& expected, bool same = true) {
  const auto drawn = draw(expected[0].numel());
  for (size_t i = 0; i < drawn.size(); ++i) EXPECT_EQ(at::equal(drawn[i], expected[i]), same) << "device " << i;
}

TEST(RandomStates, GoOnWhereTheyWere) {
  const auto device = testing::device_of_tests();
  seed_random_states(3, device);
  draw(5);
  const Dict states = random_states(device);
  const auto drawn = draw(1000);
  seed_random_states(4, device);
  expect_drawn(drawn, /*same=*/false);
  ASSERT_TRUE(restore_random_states(states, device));
  expect_drawn(drawn);
}

TEST(RandomStates, MayBeTensors) {  // as torch.get_rng_state() gives them to Megatron
  const auto device = testing::device_of_tests();
  seed_random_states(3, device);
  Dict states;
  states.set("random_rng_state", Tuple{{3, Tuple{{1, 2}}, Value()}});
  states.set("torch_rng_state", tensor_value(generator_state(at::globalContext().defaultGenerator(c10::kCPU))));
  if (!device.is_cpu()) {
    states.set("cuda_rng_state", tensor_value(generator_state(at::globalContext().defaultGenerator(device))));
  }
  const auto drawn = draw(10);
  ASSERT_TRUE(restore_random_states(states, device));
  expect_drawn(drawn);
}

TEST(RandomStates, OfOtherDevicesChangeNothing) {
  const auto device = testing::device_of_tests();
  seed_random_states(3, device);
  Dict other;
  other.set("cuda_rng_state", Bytes{std::string(16, 'x')});
  EXPECT_FALSE(restore_random_states(other, device));
  other.set("torch_rng_state", Bytes{std::string(16, 'x')});  // a GPU's is so short
  EXPECT_FALSE(restore_random_states(other, device));
  if (!device.is_cpu()) {
    EXPECT_FALSE(restore_random_states(random_states(c10::kCPU), device));
  }
  const auto drawn = draw(10);
  seed_random_states(3, device);
  expect_drawn(drawn);
}

}  // namespace
}  // namespace megashard
