// In backward an unsharded weight is freed as soon as its gradient is complete, unless it is still used.

#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>

#include "parallel/fsdp/detail/fsdp_param.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

bool has_memory(const at::Tensor& weight) { return find_fsdp_param(weight)->unsharded().allocated(); }

/// One step of a unit with two weights and of a plain module; gradients must be bit-identical.
void expect_equal(const Body& body) {
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    Twins twins({{5, 5}, {5, 5}}, body, resharding(world));
    const auto backward = [](auto& module) {
      const at::Tensor x = fixed({4, 5}, 10).requires_grad_();
      module.forward(x).sum().backward();
      return x.grad();
    };
    EXPECT_TRUE(at::equal(backward(twins.unit), backward(twins.plain)));
    twins.expect_equal_gradients();
    twins.expect_sharded();
  });
}

bool is_unit(const Weights& w) { return find_fsdp_param(w[0]) != nullptr; }

TEST(EarlyRelease, AWeightGoesWhenItsGradientIsComplete) {
  expect_equal([](const Weights& w, at::Tensor x) {
    const at::Tensor middle = at::tanh(at::linear(x, w[0]));
    if (is_unit(w)) {
      middle.register_hook([w](const at::Tensor&) {
        EXPECT_TRUE(has_memory(w[0]));
        EXPECT_FALSE(has_memory(w[1]));
      });
    }
    return at::linear(middle, w[1]);
  });
}

TEST(EarlyRelease, AWeightThatIsUsedTwiceGoesAfterTheSecondUse) {
  expect_equal([](const Weights& w, at::Tensor x) {
    const at::Tensor middle = at::tanh(at::linear(x, w[0]));
    if (is_unit(w)) middle.register_hook([w](const at::Tensor&) { EXPECT_TRUE(has_memory(w[0])); });
    return at::linear(at::linear(middle, w[1]), w[0]);
  });
}

TEST(EarlyRelease, AWeightOfWhichAViewIsReadStays) {
  expect_equal([](const Weights& w, at::Tensor x) {
    const at::Tensor middle = at::linear(at::linear(x, w[0]), w[1].detach());
    if (is_unit(w)) middle.register_hook([w](const at::Tensor&) { EXPECT_TRUE(has_memory(w[1])); });
    return at::linear(middle, w[1]);
  });
}

TEST(EarlyRelease, ABackwardInsideAnotherLeavesTheWeightForIt) {
  expect_equal([](const Weights& w, at::Tensor x) {
    const at::Tensor middle = x.sum() * w[0], other = (x.detach().sum() * w[0]).sum();
    middle.register_hook([other](const at::Tensor&) { other.backward(); });
    return at::linear(middle, w[1]);
  });
}

TEST(EarlyRelease, AForwardInsideBackwardGathersAgainWhatWent) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto body = [](const Weights& w, at::Tensor x) { return at::linear(at::tanh(at::linear(x, w[0])), w[1]); };
    Twins twins({{5, 5}, {5, 5}}, body, resharding(world));
    const at::Tensor other = fixed({3, 5}, 20);
    at::Tensor evaluated;
    twins.unit.body = [&](const Weights& w, at::Tensor x) {
      const at::Tensor middle = at::tanh(at::linear(x, w[0]));
      if (c10::GradMode::is_enabled()) {
        middle.register_hook([&, w](const at::Tensor&) {
          const c10::NoGradGuard evaluation;
          EXPECT_FALSE(has_memory(w[1]));
          evaluated = twins.unit.forward(other);
        });
      }
      return at::linear(middle, w[1]);
    };
    const at::Tensor x = fixed({4, 5}, 10).requires_grad_();
    twins.plain.forward(x).sum().backward();
    twins.unit.forward(x).sum().backward();
    EXPECT_TRUE(at::equal(evaluated, twins.plain.forward(other)));
    twins.expect_equal_gradients();
    twins.expect_sharded();
  });
}

}  // namespace
}  // namespace megashard::testing
