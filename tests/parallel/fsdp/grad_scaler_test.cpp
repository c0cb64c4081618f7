// test_fully_shard_grad_scaler.py: an overflow on one rank counts on all.

#include <cmath>
#include <limits>

#include "parallel/fsdp/grad_scaler.h"
#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

constexpr GradScaler::Options kScaling{.initial_scale = 4, .growth_interval = 2};

/// Backward of a scaled loss on fresh gradients, the same input on every rank.
void scaled_backward(GradScaler& scaler, Chain& plain, Chain& chain) {
  plain.root.zero_grad();
  chain.root.zero_grad();
  plain.forward().backward();
  scaler.scale(chain.forward()).backward();
}

void expect_scaling(const DeviceMeshPtr& mesh) {
  const int ranks = mesh->group(mesh->ndim() - 1)->size();
  Chain plain, chain;
  chain.shard({.mesh = mesh});
  const auto parameters = chain.root.parameters();
  GradScaler scaler(kScaling);

  scaled_backward(scaler, plain, chain);
  scaler.unscale_(parameters);
  EXPECT_TRUE(scaler.finite());
  expect_gradients_of(plain.root, chain.root);  // powers of two: exact
  scaler.update();
  EXPECT_EQ(scaler.scale(), 4);  // one of two good steps

  for (const float overflow : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (int rank = 0; rank < ranks; ++rank) {  // the rank that has the rows; the same on replicas
      const double before = scaler.scale();
      scaled_backward(scaler, plain, chain);
      if (mesh->group(mesh->ndim() - 1)->rank() == rank) {
        const c10::NoGradGuard no_grad;
        parameters[1].grad().fill_(overflow);
      }
      scaler.unscale_(parameters);
      EXPECT_FALSE(scaler.finite()) << "overflow on rank " << rank;
      scaler.update();
      EXPECT_EQ(scaler.scale(), before / 2);
    }
  }

  const double backed_off = scaler.scale();
  for (int step = 0; step < 2; ++step) {  // an overflow restarts the interval
    EXPECT_EQ(scaler.scale(), backed_off);
    scaled_backward(scaler, plain, chain);
    scaler.unscale_(parameters);
    EXPECT_TRUE(scaler.finite());
    expect_gradients_of(plain.root, chain.root);
    descend(plain.root);
    descend(chain.root);
    scaler.update();
  }
  EXPECT_EQ(scaler.scale(), 2 * backed_off);
  expect_weights_of(plain.root, chain.root);
}

TEST(FullyShardGradScaler, test_gradient_scaler) {
  run_ranks(2, [](const ProcessGroupPtr& world) { expect_scaling(flat_mesh(world)); });
  run_ranks(4, [](const ProcessGroupPtr& world) {
    expect_scaling(
        std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"replicate", "shard"}));
  });
}

TEST(FullyShardGradScaler, ReducedFp16OverflowsAreSeen) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.param_dtype = at::kHalf;
    Formula unit({{6, 6}}, linear);
    fully_shard(unit, options);
    GradScaler scaler({.initial_scale = 65536});
    const at::Tensor x = fixed({4, 6}, 1);
    for (int step = 0; step < 20 && scaler.scale() > 1; ++step) {
      unit.zero_grad();
      scaler.scale(unit.forward(x).sum()).backward();
      scaler.unscale_(unit.parameters());
      const bool finite = scaler.finite();
      scaler.update();
      if (finite) break;
    }
    EXPECT_LT(scaler.scale(), 65536);  // 1 * 65536 is infinite in fp16
    EXPECT_TRUE(unit.w[0].grad().isfinite().all().item<bool>());
  });
}

TEST(FullyShardGradScaler, MisuseThrows) {
  GradScaler scaler(kScaling);
  contains(message_of([&] { scaler.update(); }), "call unscale_ first");
  run_ranks(1, [&](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    scaler.unscale_(chain.root.parameters());
    contains(message_of([&] { scaler.unscale_(chain.root.parameters()); }), "once an iteration");
  });
  contains(message_of([] { GradScaler({.backoff_factor = 1}); }), "check GradScaler's options");
  contains(message_of([] { GradScaler({.initial_scale = 4, .min_scale = 8}); }), "check GradScaler's options");
  contains(message_of([] { GradScaler({.hysteresis = 0}); }), "check GradScaler's options");
}

/// Scales after steps; "x" marks an overflow.
std::vector<double> scales_after(GradScaler& scaler, const std::string& steps) {
  std::vector<double> scales;
  for (const char step : steps) {
    scaler.update(at::scalar_tensor(step == 'x' ? 1 : 0, at::dtype(at::kFloat).device(device_of_tests())));
    scales.push_back(scaler.scale());
  }
  return scales;
}

TEST(GradScaler, BacksOffWhenHysteresisIsUsedUpAndGrowsByTheWindow) {
  using Scales = std::vector<double>;
  GradScaler scaler({.initial_scale = 8, .growth_interval = 3, .min_scale = 2, .hysteresis = 2}, device_of_tests());
  EXPECT_EQ(scales_after(scaler, "x..x"), (Scales{8, 8, 8, 4}));  // good steps do not reset it
  EXPECT_EQ(scales_after(scaler, "xxx"), (Scales{2, 2, 2}));      // lower bound
  EXPECT_EQ(scales_after(scaler, "...x"), (Scales{2, 2, 4, 4}));  // growth resets the count
  EXPECT_EQ(scales_after(scaler, "x"), (Scales{2}));

  GradScaler constant({.initial_scale = 8, .is_dynamic = false, .growth_interval = 1}, device_of_tests());
  EXPECT_EQ(scales_after(constant, "x.x."), (Scales{8, 8, 8, 8}));
  GradScaler largest({.initial_scale = std::ldexp(1.0, 127), .growth_interval = 1}, device_of_tests());
  EXPECT_EQ(scales_after(largest, "."), (Scales{std::ldexp(1.0, 127)}));  // twice that overflows fp32
}

TEST(GradScaler, GoesOnFromItsState) {
  const GradScaler::Options options{.initial_scale = 64, .growth_interval = 4, .hysteresis = 3};
  GradScaler whole(options, device_of_tests()), first(options, device_of_tests()), second(options, device_of_tests());
  scales_after(whole, "x..");
  scales_after(first, "x..");
  const auto state = first.state();
  EXPECT_EQ(state.growth_tracker, 2);
  EXPECT_EQ(state.hysteresis_tracker, 2);
  second.load_state(state);
  EXPECT_EQ(scales_after(whole, "..xx.x....xx"), scales_after(second, "..xx.x....xx"));
}

TEST(GradScaler, TheHostDoesNotWaitForIt) {
  MEGASHARD_SIM_ONLY();
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    GradScaler scaler({}, world->device());
    const at::Tensor loss = chain.forward();
    simulated_cuda().take_host_syncs();
    scaler.scale(loss).backward();
    scaler.unscale_(chain.root.parameters());
    scaler.update();
    EXPECT_TRUE(simulated_cuda().take_host_syncs().empty());
  });
}

}  // namespace
}  // namespace megashard::testing
