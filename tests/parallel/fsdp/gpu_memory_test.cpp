// Memory as documented in docs/group_life_cycle.md, to the byte, and without growth; on the simulated device.

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/optim/adamw.h>

#include "parallel/collectives/fake_process_group.h"
#include "parallel/fsdp/grad_norm.h"
#include "tests/support/chain.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

/// Size of the block that the allocator returns for `bytes`.
int64_t block(int64_t bytes) { return (bytes + 511) / 512 * 512; }

/// Allocator statistics of the current device.
struct Bytes {
  int64_t current, peak, reserved;
};
Bytes bytes() {
  const auto device = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
  const auto stats = at::getDeviceAllocator(at::kCUDA)->getDeviceStats(device.index());
  return {stats.allocated_bytes[0].current, stats.allocated_bytes[0].peak, stats.reserved_bytes[0].current};
}
void restart_peak() { at::getDeviceAllocator(at::kCUDA)->resetPeakStats(0); }
int64_t pinned_bytes() { return at::getHostAllocator(at::kCUDA)->get_stats().allocated_bytes.current; }

ProcessGroupPtr fake_world(int ranks) {
  return make_fake_group({.rank = 0, .world_size = ranks, .device_type = at::kCUDA});
}

class GpuMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!on_simulated_device()) GTEST_SKIP() << "not run: MEGASHARD_TEST_DEVICE is not sim";
    simulated_cuda().set_device(0);
  }
};

/// A chain of units and a root, each of one fp32 weight [width, width]; rank 0.
struct Job {
  int64_t width;
  int ranks;
  bool mixed;  // gathered in bf16, reduced in fp32

  static constexpr int64_t kUnits = 4, kRows = 2;
  int64_t gathered_element() const { return mixed ? 2 : 4; }
  int64_t local() const { return (width + ranks - 1) / ranks * width; }  // elements
  static constexpr int64_t kFlags = 1;  // one element per parameter: number of ranks that had its gradient
  // Sizes of blocks.
  int64_t stored() const { return block(local() * 4); }
  int64_t full() const { return block(width * width * gathered_element()); }  // an unsharded parameter, or its gradient
  int64_t packed() const { return block(ranks * ((local() * gathered_element() + 15) / 16 * 16)); }
  int64_t reduced_part() const { return ((local() + kFlags) * 4 + 127) / 128 * 128; }
  int64_t to_reduce() const { return block(ranks * reduced_part()); }
  int64_t reduced() const { return block(reduced_part()); }
  int64_t activation() const { return block(kRows * width * gathered_element()); }
  int64_t input() const { return block(kRows * width * 4) + (mixed ? activation() : 0); }
  // Peaks and totals.
  int64_t sharded() const { return (kUnits + 1) * stored(); }
  int64_t forward_peak() const {
    const int64_t gathering = full() + 2 * packed() + (kUnits - 1) * activation();
    const int64_t computing = 2 * full() + packed() + kUnits * activation();
    return sharded() + input() + std::max(gathering, computing);
  }
  int64_t after_forward() const { return sharded() + input() + kUnits * activation() + block(4); }
  int64_t backward_peak() const {  // at the second unit, while the first one's weight is gathered
    const int64_t gradients = to_reduce() + (kUnits - 2) * reduced();
    const int64_t activations = 3 * activation() + 2 * block(4);
    return sharded() + input() + 3 * full() + packed() + gradients + activations;
  }
  int64_t after_backward() const { return sharded() + (kUnits + 1) * reduced(); }
};

TEST_F(GpuMemory, IsWhatTheFormulaSays) {
  for (const Job& job :
       {Job{256, 2, false}, Job{256, 4, false}, Job{250, 4, false}, Job{256, 2, true}, Job{250, 4, true}}) {
    SCOPED_TRACE(c10::str(job.width, " wide, ", job.ranks, " ranks", job.mixed ? ", bf16" : ""));
    const int64_t base = bytes().current;
    Chain chain(Job::kUnits, job.width);
    FullyShardOptions options{.mesh = flat_mesh(fake_world(job.ranks)), .reshard_after_forward = true};
    if (job.mixed) {
      options.mixed_precision.param_dtype = at::kBFloat16;
      options.mixed_precision.reduce_dtype = at::kFloat;
    }
    chain.shard(options);
    EXPECT_EQ(bytes().current - base, job.sharded()) << "after sharding";
    torch::optim::AdamW optimizer(chain.root.parameters(), torch::optim::AdamWOptions(1e-3));
    for (int step = 0; step < 3; ++step) {
      const int64_t others = step == 0 ? base : base + 2 * job.sharded();  // Adam's moments
      {
        const at::Tensor x = fixed({Job::kRows, job.width}, 1).to(at::kCUDA).requires_grad_();
        restart_peak();
        const at::Tensor loss = chain.root.forward(x).sum();
        EXPECT_EQ(bytes().peak - others, job.forward_peak()) << "in forward";
        EXPECT_EQ(bytes().current - others, job.after_forward());
        restart_peak();
        loss.backward();
        EXPECT_EQ(bytes().peak - others, job.backward_peak()) << "in backward";
      }
      EXPECT_EQ(bytes().current - others, job.after_backward());
      optimizer.step();
      EXPECT_EQ(bytes().current - base, job.after_backward() + 2 * job.sharded());
      chain.root.zero_grad();
      EXPECT_EQ(bytes().current - base, 3 * job.sharded()) << "after zero_grad";
    }
  }
}

/// After the last of 200 steps memory use is the same as after the third.
void expect_no_growth(const ProcessGroupPtr& world, const std::vector<int>& mesh,
                      const std::function<void(FullyShardOptions&)>& choose = nullptr) {
  const std::vector<std::string> names = {"replicate", "shard"};
  FullyShardOptions options{.mesh = std::make_shared<DeviceMesh>(
                                world, mesh, std::vector<std::string>(names.end() - std::ssize(mesh), names.end()))};
  if (choose) choose(options);
  Chain chain(1, 9);
  chain.shard(options);
  const auto parameters = chain.root.parameters();
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3));
  const at::Tensor x = fixed({2, 9}, 1).to(at::kCUDA);
  const auto held_after = [&](int steps) {
    for (int step = 0; step < steps; ++step) {
      chain.events.clear();
      const at::Tensor loss = chain.root.forward(x).sum();
      loss.backward();
      clip_grad_norm_(parameters, 1.0);
      optimizer.step();
      optimizer.zero_grad();
      loss.item();
    }
    return std::tuple(bytes().current, bytes().reserved, pinned_bytes());
  };
  const auto early = held_after(3);
  EXPECT_EQ(held_after(197), early);
}

TEST_F(GpuMemory, DoesNotGrow) {
  run_ranks(2, [](const ProcessGroupPtr& world) { expect_no_growth(world, {2}); });
}

TEST_F(GpuMemory, DoesNotGrowWithReplicas) { expect_no_growth(fake_world(4), {2, 2}); }

TEST_F(GpuMemory, DoesNotGrowInMixedPrecision) {
  expect_no_growth(fake_world(2), {2}, [](FullyShardOptions& options) {
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.reduce_dtype = at::kFloat;
  });
}

TEST_F(GpuMemory, DoesNotGrowWithCpuOffload) {
  expect_no_growth(fake_world(2), {2}, [](FullyShardOptions& options) { options.cpu_offload.emplace(); });
  EXPECT_GT(pinned_bytes(), 0);
}

}  // namespace
}  // namespace megashard::testing
