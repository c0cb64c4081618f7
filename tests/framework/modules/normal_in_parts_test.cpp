#include "framework/modules/normal_in_parts.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include "framework/recompute/generator_state.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

class NormalInParts : public ::testing::Test {
 protected:
  void SetUp() override {
    MEGASHARD_NOT_ON_SIM("weights are drawn on the CPU");
    at::set_num_threads(3);
  }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

TEST_F(NormalInParts, AreTheNumbersOfOneThread) {
  for (const int64_t size : {1 << 18, (1 << 18) + 5, 3 * 16 * 6000 + 16, 300007}) {
    for (const int64_t drawn_before : {0, 1, 623, 624, 1000}) {
      auto one = at::detail::createCPUGenerator(7), other = at::detail::createCPUGenerator(7);
      at::rand({drawn_before}, one);
      at::rand({drawn_before}, other);
      const auto wanted = at::empty({size}).normal_(0.5, 2, one), got = at::empty({size});
      ASSERT_TRUE(normal_in_parts_(got, 0.5, 2, other));
      EXPECT_TRUE(at::equal(got, wanted)) << size << ", " << drawn_before;
      EXPECT_TRUE(same_generator_state(generator_state(one), generator_state(other))) << size << ", " << drawn_before;
    }
  }
}

TEST_F(NormalInParts, LeavesOthersAlone) {
  auto generator = at::detail::createCPUGenerator(7);
  const auto before = generator_state(generator);
  const auto numbers = at::empty({1 << 18, 2});
  EXPECT_FALSE(normal_in_parts_(numbers.select(1, 0), 0, 1, generator));
  EXPECT_FALSE(normal_in_parts_(numbers.to(at::kDouble), 0, 1, generator));
  EXPECT_FALSE(normal_in_parts_(numbers.narrow(0, 0, 100), 0, 1, generator));
  at::set_num_threads(1);
  EXPECT_FALSE(normal_in_parts_(numbers, 0, 1, generator));
  EXPECT_TRUE(same_generator_state(before, generator_state(generator)));
}

}  // namespace
}  // namespace megashard
