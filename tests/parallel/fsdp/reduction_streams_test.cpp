// Reductions with further work: conversion from the reduce dtype, and addition to existing gradients, on the streams
// that reduced them. With and without replicas.

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "parallel/collectives/fake_process_group.h"
#include "parallel/fsdp/fsdp_controls.h"
#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

struct Case {
  const char* name;
  bool replicas;
  std::optional<at::ScalarType> reduce_dtype;
};

class ReductionStreams : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Each, ReductionStreams,
                         ::testing::Values(Case{"added", false, std::nullopt}, Case{"converted", false, at::kBFloat16},
                                           Case{"added_over_replicas", true, std::nullopt},
                                           Case{"converted_over_replicas", true, at::kBFloat16}),
                         [](const auto& info) { return info.param.name; });

TEST_P(ReductionStreams, GradientsOfTwoBackwardsAddUp) {
  const Case& each = GetParam();
  run_ranks(4, [&](const ProcessGroupPtr& world) {
    Chain plain(5), chain(5);
    FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = true};
    if (each.replicas) {
      options.mesh =
          std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"replicate", "shard"});
    }
    options.mixed_precision.reduce_dtype = each.reduce_dtype;
    chain.shard(options);
    for (int step = 0; step < 2; ++step) {
      plain.root.zero_grad();
      chain.root.zero_grad();
      for (uint64_t micro = 0; micro < 2; ++micro) {
        const at::Tensor x = fixed({4, 6}, micro);
        plain.root.forward(x).sum().backward();
        chain.root.forward(x).sum().backward();
      }
      expect_gradients_of(plain.root, chain.root, each.reduce_dtype ? 2e-2 : 1e-6);
    }
  });
}

TEST(ReductionStreams, NoBufferOutlivesBackward) {
  MEGASHARD_SIM_ONLY();
  const auto allocated = [] { return at::getDeviceAllocator(at::kCUDA)->getDeviceStats(0).allocated_bytes[0].current; };
  FullyShardOptions options;
  options.mesh = std::make_shared<DeviceMesh>(make_fake_group({.world_size = 4, .device_type = at::kCUDA}),
                                              std::vector<int>{2, 2}, std::vector<std::string>{"replicate", "shard"});
  options.mixed_precision.reduce_dtype = at::kBFloat16;
  Chain chain(3, 512);
  chain.shard(options);
  const at::Tensor x = fixed({4, 512}, 1).to(at::Device(at::kCUDA, 0));
  const int64_t before = allocated();
  chain.root.forward(x).sum().backward();
  chain.root.zero_grad();
  EXPECT_LE(allocated(), before + 512);
}

TEST(ReductionStreams, GradientsReducedByHandWaitForAHooksStream) {
  MEGASHARD_SIM_ONLY();
  const at::Device gpu(at::kCUDA, 0);
  const auto own = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(gpu);
  Chain chain;
  chain.shard({.mesh = flat_mesh(make_fake_group({.world_size = 2, .device_type = at::kCUDA}))});
  const auto hook = [](at::Tensor& reduced) { reduced.mul_(2); };
  set_all_reduce_hook(chain.root, hook, own);
  for (auto& unit : chain.units) set_all_reduce_hook(*unit, hook, own);
  set_requires_gradient_sync(chain.root, false);
  chain.root.forward(fixed({4, 6}, 1).to(gpu)).sum().backward();
  synchronize_gradients(chain.root);
  for (const auto& w : chain.root.parameters()) EXPECT_TRUE(w.grad().isfinite().all().item<bool>());
}

}  // namespace
}  // namespace megashard::testing
