// Reductions on a GPU, where streams and host syncs matter: on the simulated device (MEGASHARD_TEST_DEVICE=sim), which
// also reports missing ordering.

#include <ATen/ops/equal.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <barrier>

#include "parallel/guarded_tensor.h"
#include "tests/support/chain.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

class GpuReduction : public ::testing::Test {
 protected:
  void SetUp() override { MEGASHARD_SIM_ONLY(); }
};

/// Number of times the hosts of all ranks waited for a device while `work` ran; known to rank 0.
int64_t host_syncs(const ProcessGroup& world, std::barrier<>& all, const std::function<void()>& work) {
  all.arrive_and_wait();
  if (world.rank() == 0) simulated_cuda().take_host_syncs();
  all.arrive_and_wait();
  work();
  all.arrive_and_wait();
  int64_t count = 0;
  if (world.rank() == 0) {
    for (const HostSync& sync : simulated_cuda().take_host_syncs()) count += sync.count;
  }
  all.arrive_and_wait();
  return count;
}

/// A converted gradient is written during backward; a second microbatch adds to it.
TEST_F(GpuReduction, OneRankConvertsAndAddsInOrder) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    for (const bool offload : {false, true}) {
      FullyShardOptions options{.mesh = flat_mesh(world)};
      options.mixed_precision.param_dtype = at::kBFloat16;
      if (offload) options.cpu_offload = CpuOffloadPolicy{};
      Chain chain;
      chain.shard(options);
      for (uint64_t micro = 0; micro < 3; ++micro) chain.backward(chain.forward(micro));
      EXPECT_EQ(chain.root.w[0].grad().scalar_type(), at::kFloat);
      EXPECT_EQ(chain.root.w[0].grad().is_cpu(), offload);
    }
  });
}

/// Allocations since the start.
int64_t allocations() {
  return at::getDeviceAllocator(at::kCUDA)->getDeviceStats(0).allocation[0].allocated;
}

/// bf16 gradients are cast into a buffer of their unit, but added to those of earlier microbatches without one.
TEST_F(GpuReduction, OneRankAddsNarrowGradientsAsTheyAre) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.reduce_dtype = at::kFloat;
    Chain chain;
    chain.shard(options);
    std::vector<at::Tensor> own;
    for (uint64_t micro = 0; micro < 5; ++micro) {
      chain.root.zero_grad();
      chain.backward(chain.forward(micro));
      own.push_back(unguarded(chain.root.w[0].grad()).clone());
      EXPECT_TRUE(at::equal(own[micro], own[micro].to(at::kBFloat16).to(at::kFloat)));
    }
    chain.root.zero_grad();
    std::vector<int64_t> taken;
    for (uint64_t micro = 0; micro < 3; ++micro) {
      const int64_t before = allocations();
      chain.backward(chain.forward(micro));
      taken.push_back(allocations() - before);
    }
    EXPECT_EQ(taken[1], taken[0] - 4) << "of four units";
    EXPECT_EQ(taken[2], taken[1]);
    EXPECT_TRUE(at::equal(unguarded(chain.root.w[0].grad()), own[0] + own[1] + own[2]));
    set_requires_gradient_sync(chain.root, false);
    chain.backward(chain.forward(3));
    set_requires_gradient_sync(chain.root, true);
    chain.backward(chain.forward(4));  // added to the previous one, in fp32
    EXPECT_TRUE(at::equal(unguarded(chain.root.w[0].grad()), own[0] + own[1] + own[2] + (own[3] + own[4])));
  });
}

TEST_F(GpuReduction, ReplicasOfWholeModelsReduceInOrder) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto mesh =
        std::make_shared<DeviceMesh>(world, std::vector<int>{2, 1}, std::vector<std::string>{"replicate", "shard"});
    Twins twins({{6, 6}}, linear, {.mesh = mesh});
    for (uint64_t micro = 0; micro < 3; ++micro) {
      const at::Tensor x = fixed({4, 6}, micro);
      twins.plain.forward(x).sum().backward();
      twins.unit.forward(x).sum().backward();
    }
    twins.expect_equal_gradients();
  });
}

TEST_F(GpuReduction, TheHostWaitsOnlyToNameUnusedParameters) {
  constexpr int kUnits = 4, kRanks = 2;
  std::barrier<> all(kRanks);
  run_ranks(kRanks, [&](const ProcessGroupPtr& world) {
    for (const auto unused : {UnusedParameters::kZeroFill, UnusedParameters::kError}) {
      FullyShardOptions options = resharding(world);
      options.unused_parameters = unused;
      Chain chain(/*depth=*/3);
      chain.shard(options);
      const at::Tensor x = fixed({4, 6}, 1).requires_grad_();
      const auto step = [&] { chain.root.forward(x).sum().backward(); };
      step();
      const int64_t waits = host_syncs(*world, all, step);
      const bool is_error = unused == UnusedParameters::kError;
      if (world->rank() == 0) {
        EXPECT_EQ(waits, is_error ? kUnits * kRanks : 0);
      }
    }
  });
}

}  // namespace
}  // namespace megashard::testing
