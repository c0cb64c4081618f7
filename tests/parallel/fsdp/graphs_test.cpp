// A unit in various graphs: called more than once, several live graphs, evaluation in between.

#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>

#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

at::Tensor layer(const Weights& w, at::Tensor x) { return at::tanh(at::linear(x, w[0])); }

struct GraphCase {
  const char* name;
  at::ScalarType dtype;
  ReshardAfterForward reshard;
};

class FsdpGraphs : public ::testing::TestWithParam<GraphCase> {
 protected:
  using Call = std::function<at::Tensor(at::Tensor)>;
  /// Runs `use` with a plain layer and with a unit; gradients must be bit-identical.
  static void expect_equal(const std::function<void(const Call& call, at::Tensor a, at::Tensor b)>& use,
                           bool inputs_require_grad = true, bool one_backward = true) {
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = GetParam().reshard};
      const auto dtype = GetParam().dtype;
      if (dtype != at::kFloat) options.mixed_precision.param_dtype = dtype;
      Twins twins({{5, 5}}, layer, options);
      for (int step = 0; step < 2; ++step) {
        auto input = [&](uint64_t seed) { return fixed({4, 5}, seed).to(dtype).requires_grad_(inputs_require_grad); };
        use([&](at::Tensor x) { return twins.plain.forward(x); }, input(10), input(11));
        use([&](at::Tensor x) { return twins.unit.forward(x); }, input(10), input(11));
        if (one_backward || dtype == at::kFloat) {
          twins.expect_equal_gradients();
        } else {  // the shard accumulates in fp32, a plain bf16 parameter in bf16
          const at::Tensor expected = part_like(twins.plain.w[0].grad(), twins.unit.w[0]);
          EXPECT_LE((twins.unit.w[0].grad() - expected).abs().max().item<float>(),
                    0.01 * expected.abs().max().item<float>());
        }
        twins.expect_sharded();
        twins.zero_grad();
      }
    });
  }
};

TEST_P(FsdpGraphs, ChainOfTwoCalls) {
  expect_equal([](const Call& call, auto a, auto) { call(call(a)).sum().backward(); });
}

TEST_P(FsdpGraphs, SiameseCalls) {
  expect_equal([](const Call& call, auto a, auto b) { (call(a).sum() + call(b).sum()).backward(); });
}

TEST_P(FsdpGraphs, TwoForwardsTwoBackwardsInOrder) {
  expect_equal(
      [](const Call& call, auto a, auto b) {
        const auto first = call(a).sum(), second = call(b).sum();
        first.backward();
        second.backward();
      },
      true, /*one_backward=*/false);
}

TEST_P(FsdpGraphs, TwoForwardsTwoBackwardsInReverseOrder) {
  expect_equal(
      [](const Call& call, auto a, auto b) {
        const auto first = call(a).sum(), second = call(b).sum();
        second.backward();
        first.backward();
      },
      true, /*one_backward=*/false);
}

TEST_P(FsdpGraphs, RetainedGraph) {
  expect_equal([](const Call& call, auto a, auto) {
    const auto loss = call(a).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
}

TEST_P(FsdpGraphs, EvaluationBetweenForwardAndBackward) {
  expect_equal([](const Call& call, auto a, auto b) {
    const auto loss = call(a).sum();
    {
      const c10::NoGradGuard evaluation;
      call(b);
    }
    loss.backward();
  });
}

TEST_P(FsdpGraphs, EvaluationInsideBackwardBeforeTheUnits) {
  expect_equal([](const Call& call, auto a, auto b) {
    const auto y = call(a);
    const auto after = y * 2;
    after.register_hook([&](const at::Tensor&) {
      const c10::NoGradGuard evaluation;
      call(b);
    });
    after.sum().backward();
  });
}

TEST_P(FsdpGraphs, EvaluationInsideBackwardAfterTheUnits) {
  expect_equal([](const Call& call, auto a, auto b) {
    const auto before = a * 2;
    before.register_hook([&](const at::Tensor&) {
      const c10::NoGradGuard evaluation;
      call(b);
    });
    call(before).sum().backward();
  });
}

TEST_P(FsdpGraphs, InputWithoutGrad) {
  expect_equal([](const Call& call, auto a, auto) { call(a).sum().backward(); },
               /*inputs_require_grad=*/false);
}

TEST_P(FsdpGraphs, GraphThatIsDropped) {
  expect_equal([](const Call& call, auto a, auto b) {
    call(b);
    call(a).sum().backward();
  });
}

INSTANTIATE_TEST_SUITE_P(All, FsdpGraphs,
                         ::testing::Values(GraphCase{"fp32", at::kFloat, true}, GraphCase{"bf16", at::kBFloat16, true},
                                           GraphCase{"kept", at::kFloat, false}),
                         [](const auto& info) { return info.param.name; });

TEST(FsdpGraphs, RequiresGradMayBeSwitchedBetweenStepsAndWithALiveGraph) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 5}}, layer, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    auto step = [&](bool before, bool after) {
      for (FormulaImpl* model : {&twins.plain, static_cast<FormulaImpl*>(&twins.unit)}) {
        const auto x = fixed({4, 5}, 3).requires_grad_();
        model->w[0].set_requires_grad(before);
        const auto y = model == &twins.plain ? model->forward(x) : twins.unit.forward(x);
        model->w[0].set_requires_grad(after);
        y.sum().backward();
      }
      EXPECT_EQ(twins.plain.w[0].grad().defined(), before && after);
      twins.expect_equal_gradients();
      twins.zero_grad();
    };
    step(true, true);
    step(true, false);
    step(false, false);
    step(true, true);
    twins.zero_grad();
  });
}

TEST(FsdpGraphs, HooksOnAParameterSeeOneWholeGradientABackward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = true};
    options.mixed_precision.param_dtype = at::kBFloat16;
    Twins twins({{5, 5}}, layer, options);
    int fired = 0;
    twins.unit.w[0].register_hook([&](const at::Tensor& gradient) {
      ++fired;
      EXPECT_EQ(gradient.sizes(), at::IntArrayRef({5, 5}));
    });
    for (int step = 1; step <= 2; ++step) {
      twins.unit.forward(twins.unit.forward(fixed({4, 5}, 3).requires_grad_())).sum().backward();
      EXPECT_EQ(fired, step);
    }
  });
}

}  // namespace
}  // namespace megashard::testing
