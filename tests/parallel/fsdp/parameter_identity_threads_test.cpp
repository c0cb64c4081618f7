// Numbered cases of docs/parameter_identity.md from 15 on: threads, views at a unit's edge, autocast, dtypes. Cases 14,
// 18, 22 and 24 need framework/ and are tested in tests/framework (see the page's table).

#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>

#include <thread>

#include "parallel/fsdp/detail/fsdp_state.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

TEST(ParameterIdentity, Case15_RanksAsThreadsRunAutogradOnTheirOwnThread) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    EXPECT_FALSE(c10::AutogradState::get_tls_state().get_multithreading_enabled());
    Formula unit({{5, 6}}, linear);
    fully_shard(unit, resharding(world));
    const auto rank_thread = std::this_thread::get_id();
    const auto y = unit.forward(fixed({4, 6}, 1));
    y.register_hook([&](const at::Tensor&) { EXPECT_EQ(std::this_thread::get_id(), rank_thread); });
    y.sum().backward();
  });
}

TEST(ParameterIdentity, Case16_BackwardRunsOnAThreadThatNeverSawForward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}}, linear, resharding(world));
    for (int step = 0; step < 2; ++step) {
      twins.zero_grad();
      twins.plain.forward(fixed({4, 6}, 1)).pow(2).sum().backward();
      const at::Tensor loss = twins.unit.forward(fixed({4, 6}, 1)).pow(2).sum();
      std::string failure;
      std::thread([&] {
        c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
        try {
          loss.backward();
        } catch (const std::exception& error) {
          failure = error.what();
        }
      }).join();
      EXPECT_EQ(failure, "");
      twins.expect_equal_gradients();
      twins.expect_sharded();
    }
  });
}

/// Runs `last` inside `depth` nested backwards: beyond 60 the engine changes threads.
void nest_backwards(int depth, const std::function<void()>& last) {
  const c10::AutoGradMode recording(true);  // off inside a backward
  if (depth == 0) return last();
  at::Tensor x = fixed({1}, 1).requires_grad_() * 1;
  pass_through_node("Nest", {&x}, [&] { nest_backwards(depth - 1, last); });
  x.sum().backward();
}

TEST(ParameterIdentity, Case16_AWholeStepDeepInsideReentrantBackwards) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}}, linear, resharding(world));
    c10::AutogradState::get_tls_state().set_multithreading_enabled(true);
    const auto rank_thread = std::this_thread::get_id();
    nest_backwards(65, [&] {
      EXPECT_NE(std::this_thread::get_id(), rank_thread);
      twins.plain.forward(fixed({4, 6}, 1)).pow(2).sum().backward();
      twins.unit.forward(fixed({4, 6}, 1)).pow(2).sum().backward();
    });
    twins.expect_equal_gradients();
    twins.expect_sharded();
  });
}

TEST(ParameterIdentity, Case19_InPlaceChangeOfAUnitsInputRaisesWhereItsCallerCouldNotSeeIt) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins(
        {{5, 6}}, [](const Weights& w, at::Tensor x) { return at::linear(x.relu_(), w[0]); }, resharding(world));
    const at::Tensor x = fixed({4, 6}, 1).requires_grad_() * 1;
    contains(message_of([&] { twins.unit.forward(x); }), "was changed in place inside its forward");
    twins.expect_sharded();
    twins.plain.forward(fixed({4, 6}, 1)).sum().backward();  // no graph: nothing to see
    twins.unit.forward(fixed({4, 6}, 1)).sum().backward();
    twins.expect_equal_gradients();
  });
}

TEST(ParameterIdentity, Case20_ACallerMayChangeAReturnedViewInPlace) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const Body view = [](const Weights& w, at::Tensor x) { return at::linear(x, w[0]).view({10, 2}); };
    const Body chunk = [](const Weights& w, at::Tensor x) { return at::linear(x, w[0]).narrow(1, 0, 2); };
    for (const auto& body : {view, chunk}) {
      Twins twins({{5, 6}}, body, resharding(world));
      const at::Tensor expected = twins.plain.forward(fixed({4, 6}, 1)).mul_(3);
      const at::Tensor output = twins.unit.forward(fixed({4, 6}, 1)).mul_(3);
      EXPECT_TRUE(at::equal(output, expected));
      expected.pow(2).sum().backward();
      output.pow(2).sum().backward();
      twins.expect_equal_gradients();
    }
  });
}

TEST(ParameterIdentity, Case21_AUnitThatReturnsItsParameterRaises) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const Body parameter = [](const Weights& w, at::Tensor) { return w[0]; };
    const Body view = [](const Weights& w, at::Tensor) { return w[0].view({-1}); };
    for (const auto& body : {parameter, view}) {
      Twins twins({{5, 6}}, body, resharding(world));
      for (int i = 0; i < 2; ++i) {
        contains(message_of([&] { twins.unit.forward(fixed({4, 6}, 1)); }), "returns a parameter or a view of it");
        twins.expect_sharded();
      }
    }
    Twins inner({{5, 6}}, linear, resharding(world));
    Twins outer(
        {{5, 6}}, [&](const Weights&, at::Tensor) { return inner.unit.w[0]; }, resharding(world));
    contains(message_of([&] { outer.unit.forward(fixed({4, 6}, 1)); }), "returns a parameter");
  });
}

struct Autocast {
  Autocast() {
    at::autocast::set_autocast_enabled(device_of_tests().type(), true);
    at::autocast::set_autocast_dtype(device_of_tests().type(), at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_of_tests().type(), false);
  }
};

TEST(ParameterIdentity, Case23_AutocastSeesChangedWeights) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}}, linear, resharding(world));
    const Autocast autocast;  // one region around two steps: its cache would keep the first weights
    for (int step = 0; step < 2; ++step) {
      twins.zero_grad();
      at::autocast::clear_cache();
      const at::Tensor expected = twins.plain.forward(fixed({4, 6}, 1));
      const at::Tensor output = twins.unit.forward(fixed({4, 6}, 1));
      EXPECT_EQ(output.scalar_type(), at::kBFloat16);
      ASSERT_TRUE(at::equal(output, expected)) << "step " << step;
      expected.sum().backward();
      output.sum().backward();
      twins.expect_equal_gradients();
      EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
      const c10::NoGradGuard no_grad;
      twins.plain.w[0].mul_(0.5);
      twins.unit.w[0].mul_(0.5);
    }
  });
}

TEST(ParameterIdentity, Case25_GradientsHaveTheStoredDtypeForFusedSteps) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Formula unit({{5, 6}}, linear, at::kBFloat16);
    auto options = resharding(world);
    options.mixed_precision.reduce_dtype = at::kFloat;
    fully_shard(unit, options);
    unit.forward(fixed({4, 6}, 1).to(at::kBFloat16)).sum().backward();
    const at::Tensor& w = unit.w[0];
    ASSERT_EQ(w.grad().scalar_type(), at::kBFloat16);
    const c10::NoGradGuard no_grad;
    const at::Tensor before = w.clone(), average = at::zeros_like(w), square = at::zeros_like(w);
    const at::Tensor step = fixed({}, 1).fill_(1);
    at::_fused_adamw_({w}, {w.grad()}, {average}, {square}, {}, {step}, 0.1, 0.9, 0.99, 0.1, 1e-8, false, false, {},
                      {});
    EXPECT_FALSE(at::equal(w, before));
  });
}

}  // namespace
}  // namespace megashard::testing
