#include "parallel/collectives/fake_process_group.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "parallel/collectives/routed_process_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

// A real world in which every rank holds the same tensors must see the same results as one fake rank.
TEST(FakeProcessGroup, SeesWhatAWorldOfEqualRanksSees) {
  MEGASHARD_NOT_ON_SIM("it compares groups of a CPU");
  testing::run_ranks(3, [](const ProcessGroupPtr& world) {
    const ProcessGroupPtr fake = make_fake_group({.rank = world->rank(), .world_size = 3});
    const auto expect_equal = [&](const auto& collective) {
      EXPECT_TRUE(at::equal(collective(*world), collective(*fake)));
    };
    expect_equal([](ProcessGroup& group) {
      at::Tensor output = at::empty({15});
      group.all_gather_into(output, at::arange(5, at::kFloat)).wait();
      return output;
    });
    expect_equal([](ProcessGroup& group) {
      at::Tensor output = at::full({15}, -1, at::kFloat);
      const at::Tensor slice = output.narrow(0, group.rank() * 5, 5).copy_(at::arange(5, at::kFloat));
      group.all_gather_into(output, slice).wait();
      return output;
    });
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax}) {
      expect_equal([op](ProcessGroup& group) {
        at::Tensor output = at::empty({5});
        group.reduce_scatter_into(output, at::arange(15, at::kFloat), op).wait();
        return output;
      });
      expect_equal([op](ProcessGroup& group) {
        at::Tensor tensor = at::arange(5, at::kFloat);
        group.all_reduce(tensor, op).wait();
        return tensor;
      });
    }
    expect_equal([](ProcessGroup& group) {
      at::Tensor output = at::empty({6});
      group.all_to_all_into(output, at::arange(6, at::kFloat)).wait();
      return output;
    });
    expect_equal([](ProcessGroup& group) {
      at::Tensor output = at::empty({6});
      group.shift_into(output, at::arange(6, at::kFloat), 1).wait();
      return output;
    });
    EXPECT_EQ(world->all_gather_strings("plan"), fake->all_gather_strings("plan"));
  });
}

TEST(FakeProcessGroup, LargeWorldsOnTheMetaDevice) {
  const ProcessGroupPtr world = make_fake_group({.rank = 1023, .world_size = 4096, .device_type = c10::kMeta});
  const auto meta = at::TensorOptions().device(at::kMeta);
  EXPECT_FALSE(world->all_reduce(at::empty({1 << 30}, meta), ReduceOp::kSum).pending());
  const ProcessGroupPtr node = world->subgroup({1016, 1023}, "node");
  EXPECT_EQ(node->rank(), 1);
  EXPECT_EQ(node->ranks(), (std::vector{1016, 1023}));
}

TEST(RoutedProcessGroup, RunsWhereTheTensorIs) {
  MEGASHARD_NOT_ON_SIM("it compares groups of a CPU");
  testing::run_ranks(2, [](const ProcessGroupPtr& world) {
    const ProcessGroupPtr accelerator =
        make_fake_group({.rank = world->rank(), .world_size = 2, .device_type = c10::kMeta});
    const ProcessGroupPtr both = make_routed_group(world, accelerator);
    EXPECT_EQ(both->device_type(), c10::kMeta);
    at::Tensor gathered = at::empty({2}, at::kLong);
    both->all_gather_into(gathered, at::arange(world->rank(), world->rank() + 1, at::kLong)).wait();
    EXPECT_TRUE(at::equal(gathered, at::arange(2, at::kLong)));
    both->all_reduce(at::empty({3}, at::TensorOptions().device(at::kMeta)), ReduceOp::kSum).wait();
    EXPECT_EQ(both->all_gather_strings(std::to_string(world->rank())), (std::vector<std::string>{"0", "1"}));
    EXPECT_EQ(both->subgroup({world->rank()}, "alone")->size(), 1);
    both->barrier();
  });
}

}  // namespace
}  // namespace megashard
