// Copies from and to host memory: additions to gradients, reads of gradients and writes of rows must wait. On a CPU
// there are no copies, and the same results.

#include "parallel/fsdp/fsdp_controls.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

/// A unit whose gradients are copied to pinned memory, and the plain model.
struct Offloaded : Twins {
  explicit Offloaded(const ProcessGroupPtr& world)
      : Twins({{6, 6}}, linear, {.mesh = flat_mesh(world), .cpu_offload = CpuOffloadPolicy{}}) {}
  void expect_equal() {
    const at::Tensor expected = part_like(plain.w[0].grad(), unit.w[0]);
    EXPECT_TRUE(at::equal(unit.w[0].grad(), expected.cpu()));
  }
};

/// No other wait of the host lies between backward and its read.
TEST(OffloadedGradients, AreThereAfterBackward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Offloaded twins(world);
    const at::Tensor x = fixed({4, 6}, 1);
    twins.plain.forward(x).sum().backward();
    const at::Tensor expected = part_like(twins.plain.w[0].grad(), twins.unit.w[0]).cpu();
    twins.unit.forward(x).sum().backward();
    EXPECT_TRUE(at::equal(twins.unit.w[0].grad(), expected));
  });
}

TEST(OffloadedGradients, SecondBackwardsAddToThem) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Offloaded twins(world);
    for (int micro = 0; micro < 3; ++micro) {
      const at::Tensor x = fixed({4, 6}, micro);
      twins.plain.forward(x).pow(2).sum().backward();
      twins.unit.forward(x).pow(2).sum().backward();
    }
    twins.expect_equal();
  });
}

/// The second reduction of one backward adds to a gradient that the first may still be copying.
TEST(OffloadedGradients, AUnitCalledTwiceInOneBackward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Offloaded twins(world);
    const at::Tensor x = fixed({4, 6}, 1).requires_grad_();
    twins.plain.forward(twins.plain.forward(x)).sum().backward();
    twins.unit.forward(twins.unit.forward(x)).sum().backward();
    twins.expect_equal();
  });
}

TEST(OffloadedGradients, HooksReadThem) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Offloaded twins(world);
    double seen = 0;
    register_post_accumulate_grad_hook(
        twins.unit.w[0], [&](const at::Tensor& parameter) { seen = parameter.grad().abs().sum().item<double>(); });
    twins.unit.forward(fixed({4, 6}, 1)).sum().backward();
    EXPECT_EQ(seen, twins.unit.w[0].grad().abs().sum().item<double>());
    EXPECT_GT(seen, 0);
  });
}

TEST(OffloadedGradients, RowsThatAreGatheredAreWrittenAfterwards) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Offloaded twins(world);
    const at::Tensor x = fixed({4, 6}, 1);
    const c10::NoGradGuard no_grad;
    for (int step = 0; step < 2; ++step) {
      const at::Tensor output = twins.unit.forward(x);
      reshard_and_view(twins.unit.w[0]).local.mul_(0.5);  // no wait for the gather yet
      EXPECT_TRUE(at::equal(output, twins.plain.forward(x))) << step;
      twins.plain.w[0].mul_(0.5);
    }
  });
}

}  // namespace
}  // namespace megashard::testing
