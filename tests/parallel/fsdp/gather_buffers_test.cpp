// Lifetime of all-gather buffers. On the simulated device, which counts memory and detects memory that is reused too
// early.

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "parallel/collectives/fake_process_group.h"
#include "parallel/fsdp/detail/fsdp_context.h"
#include "tests/support/chain.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

constexpr int64_t kWidth = 512;
constexpr int64_t kUnit = kWidth * kWidth * 4;  // bytes of one unit's weight, and of its buffer
constexpr int64_t kSlack = kUnit / 4;           // activations of four rows

const at::Device kGpu(at::kCUDA, 0);

class GatherBuffers : public ::testing::Test {
 protected:
  void SetUp() override {
    MEGASHARD_SIM_ONLY();
    x_ = fixed({4, kWidth}, 1).to(kGpu);
    chain_.shard({.mesh = flat_mesh(make_fake_group({.world_size = 2, .device_type = at::kCUDA})),
                  .reshard_after_forward = true});
    step();
    chain_.root.zero_grad();
  }

  static c10::CachingDeviceAllocator::Stat allocated() {
    return at::getDeviceAllocator(at::kCUDA)->getDeviceStats(0).allocated_bytes[0];
  }
  void step() { chain_.root.forward(x_).sum().backward(); }

  Chain chain_{4, kWidth};
  at::Tensor x_;
};

TEST_F(GatherBuffers, OneIsHeldWhileForwardRunsAndNoneAfterIt) {
  const c10::NoGradGuard no_grad;
  const int64_t before = allocated().current;
  at::getDeviceAllocator(at::kCUDA)->resetPeakStats(0);
  chain_.root.forward(x_);
  // The root's weight, a unit's, and its buffer.
  EXPECT_LE(allocated().peak, before + 3 * kUnit + kSlack);
  EXPECT_EQ(allocated().current, before);
}

TEST_F(GatherBuffers, NoneIsHeldAfterBackward) {
  step();
  // This rank's half of every weight and gradient.
  EXPECT_LE(allocated().current, 5 * kUnit + kSlack);
}

/// A unit is unsharded explicitly on another stream in the middle of forward, while this stream still reads the buffer
/// held for the previous unit.
TEST_F(GatherBuffers, AGatherOnAnotherStreamLetsGoOfTheBufferThatThisOneReads) {
  const auto side = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(kGpu);
  chain_.root.body = [&](const Weights& w, at::Tensor x) {
    for (size_t i = 0; i < chain_.units.size(); ++i) {
      x = chain_.units[i]->forward(x);
      if (i != 1) continue;
      {
        const StreamScope scope(side);
        unshard(*chain_.units[3]);
      }
      order_streams(side, CommStreams(kGpu).current());
    }
    return at::linear(x, w[0]);
  };
  step();
}

}  // namespace
}  // namespace megashard::testing
