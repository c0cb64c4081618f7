// Numbered cases 1 to 13 of docs/parameter_identity.md: attempts to break a parameter that keeps its identity.

#include <ATen/ops/embedding.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/utils/clip_grad.h>

#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

at::Tensor times(const Weights& w, at::Tensor x) { return x * w[0]; }

void train_equally(Twins& twins, at::IntArrayRef input_sizes = {4, 6}) {
  twins.zero_grad();
  const at::Tensor expected = twins.plain.forward(fixed(input_sizes, 9));
  const at::Tensor output = twins.unit.forward(fixed(input_sizes, 9));
  EXPECT_TRUE(at::equal(output, expected));
  expected.pow(2).sum().backward();
  output.pow(2).sum().backward();
  twins.expect_equal_gradients();
  twins.expect_sharded();
}

struct CountGradients : torch::autograd::PostAccumulateGradHook {
  explicit CountGradients(int& given) : count(given) {}
  void operator()(const at::Tensor& parameter) override {
    ++count;
    EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
  }
  int& count;
};

TEST(ParameterIdentity, Case01_AccumulatorMadeElsewhereStaysAlive) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FormulaImpl plain({{2, 6}}, linear);
    Formula unit({{2, 6}}, linear);
    const at::Tensor before = unit.w[0] * 1.0;  // its accumulator is older than the unit
    fully_shard(unit, resharding(world));
    for (int step = 0; step < 2; ++step) {
      const auto sharded = message_of([&] { unit.w[0] * 1.0; });  // one row, which would broadcast
      contains(sharded, "parameter 'w0' is sharded here (local rows [1, 6] of [2, 6])");
      plain.forward(fixed({4, 6}, 3)).sum().backward();
      unit.forward(fixed({4, 6}, 3)).sum().backward();
      EXPECT_TRUE(at::equal(unit.w[0].grad(), part_like(plain.w[0].grad(), unit.w[0])));
    }
  });
}

TEST(ParameterIdentity, Case02_OneAccumulatorThroughEverySwitchOfDtype) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    auto options = resharding(world);
    options.mixed_precision.param_dtype = at::kBFloat16;
    Twins twins({{6, 6}}, linear, options);
    int accumulated = 0;
    torch::autograd::impl::set_post_acc_grad_hooks(twins.unit.w[0], std::make_unique<CountGradients>(accumulated));
    const at::Tensor x = fixed({4, 6}, 3).to(at::kBFloat16);
    twins.plain.forward(twins.plain.forward(x)).sum().backward();
    twins.unit.forward(twins.unit.forward(x)).sum().backward();
    EXPECT_EQ(accumulated, 1);
    twins.expect_equal_gradients();

    twins.zero_grad();
    const at::Tensor expected = twins.plain.forward(x).pow(2).sum();
    const at::Tensor loss = twins.unit.forward(x).pow(2).sum();
    const auto gradients = torch::autograd::grad({loss}, {twins.unit.w[0]});  // whole, unreduced
    EXPECT_TRUE(at::equal(gradients[0], torch::autograd::grad({expected}, {twins.plain.w[0]})[0]));
    EXPECT_FALSE(twins.unit.w[0].grad().defined());
    twins.expect_sharded();
  });
}

TEST(ParameterIdentity, Case03_DifferentiableUseOfAShardedParameterRaises) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}}, linear, resharding(world));
    const at::Tensor loss = twins.unit.forward(fixed({4, 6}, 9)).pow(2).sum();
    contains(message_of([&] { loss + twins.unit.w[0].pow(2).sum(); }),
             "aten::pow was called outside its fully_shard unit");
    train_equally(twins);
  });
}

TEST(ParameterIdentity, Case04_ComputeOnShardsRaises) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins table({{8, 6}}, linear, resharding(world));
    Twins scale({{2}}, times, resharding(world));
    const at::Tensor& w = table.unit.w[0];
    const at::Tensor small = fixed({2}, 1).mul(0).to(at::kLong);
    contains(message_of([&] { at::embedding(w, small); }), "aten::embedding was called outside");
    contains(message_of([&] { fixed({4, 2}, 1) * scale.unit.w[0]; }), "local rows [1] of [2]");
    contains(message_of([&] { w.norm(); }), "aten::norm was called outside");
    const c10::NoGradGuard evaluation;  // silent local results are no better in evaluation or logging
    contains(message_of([&] { at::linear(fixed({4, 6}, 1), w); }), "aten::linear was called outside");
    contains(message_of([&] { w.norm(); }), "aten::norm was called outside");
    contains(message_of([&] { w.detach().norm(); }), "aten::norm was called outside");
    EXPECT_EQ(w.clone().sizes(), at::IntArrayRef({4, 6}));  // as optimizers create their state
  });
}

TEST(ParameterIdentity, Case04_FrozenParametersOfAnotherUnitAreGuardedInsideForward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Formula other({{8, 6}}, linear);
    other.w[0].set_requires_grad(false);
    fully_shard(other, resharding(world));
    Formula unit({{8, 6}}, [&](const Weights& w, at::Tensor x) { return x.add(w[0]).add(other.w[0]); });
    fully_shard(unit, resharding(world));
    for (int i = 0; i < 2; ++i)
      contains(message_of([&] { unit.forward(fixed({8, 6}, 1)); }), "aten::add was called outside");
    EXPECT_EQ(other.w[0].add(1).sizes(), at::IntArrayRef({4, 6}));  // no forward is running any more
  });
}

TEST(ParameterIdentity, Case05_AKeptViewOfAFreedFullIsAnError) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    at::Tensor kept;
    Twins twins(
        {{8, 6}},
        [&](const Weights& w, at::Tensor x) {
          kept = w[0].detach().narrow(0, 0, 2);
          return at::linear(x, w[0]);
        },
        resharding(world));
    const at::Tensor output = twins.unit.forward(fixed({4, 6}, 9));
    const std::string message = "parameter 'w0' was resharded: its full tensor is not available here";
    contains(message_of([&] { kept.add(1); }), message);
    contains(message_of([&] { kept.sum(); }), message);
    output.sum().backward();
    contains(message_of([&] { at::linear(fixed({4, 6}, 1), kept); }), message);
  });
}

TEST(ParameterIdentity, Case06_AViewCapturedInAConstructorRaises) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Formula unit({{8, 6}}, linear);
    const at::Tensor captured = unit.w[0].narrow(0, 0, 2);
    contains(message_of([&] { fully_shard(unit, resharding(world)); }),
             "parameter 'w0' shares its memory with another tensor");
  });
}

TEST(ParameterIdentity, Case07_RebindingRaisesOrIsAdopted) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Stack model(1, 6, 7);
    shard_stack(model, resharding(world));
    model.to(at::kDouble);  // the next gather adopts the rows' new dtype
    for (const auto& w : model.parameters()) EXPECT_EQ(reshard_and_view(w).local.scalar_type(), at::kDouble);
    EXPECT_EQ(model.forward(fixed({4, 6}, 1).to(at::kDouble)).scalar_type(), at::kDouble);
    torch::serialize::OutputArchive archive;
    contains(message_of([&] { model.save(archive); }), "save_checkpoint");
    torch::serialize::InputArchive input;
    contains(message_of([&] { model.load(input); }), "load_checkpoint");

    Twins twins({{5, 6}}, linear, resharding(world));
    const at::Tensor& w = twins.unit.w[0];
    twins.plain.w[0].set_data(fixed({5, 6}, 70));
    w.set_data(fixed({5, 6}, 70));  // the whole, as torch::load does
    EXPECT_EQ(global_sizes(w), (std::vector<int64_t>{5, 6}));
    const int64_t first = world->rank() == 0 ? 0 : 3, rows = world->rank() == 0 ? 3 : 2;
    EXPECT_TRUE(at::equal(reshard_and_view(w).local, fixed({5, 6}, 70).narrow(0, first, rows)));
    train_equally(twins);
    twins.plain.w[0].set_data(fixed({5, 6}, 71));
    w.set_data(part_like(fixed({5, 6}, 71), w).clone());  // local rows, as vector_to_parameters does
    train_equally(twins);
    w.set_data(fixed({4, 6}, 1));
    contains(message_of([&] { twins.unit.forward(fixed({4, 6}, 9)); }), "was replaced by a tensor of sizes [4, 6]");
    w.set_data(fixed({5, 6}, 71).to(at::kDouble));
    EXPECT_EQ(twins.unit.forward(fixed({4, 6}, 9).to(at::kDouble)).scalar_type(), at::kDouble);
    w.set_data(fixed({5, 6}, 71));
    train_equally(twins);
  });
}

TEST(ParameterIdentity, Case08_CloneAndWholeNormsRaise) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Stack model(1, 6, 7);
    shard_stack(model, resharding(world));
    contains(message_of([&] { model.clone(); }), "build a second model instead of cloning");
    model.forward(fixed({4, 6}, 1)).sum().backward();
    contains(message_of([&] { torch::nn::utils::clip_grad_norm_(model.parameters(), 1.0); }),
             "Use megashard::clip_grad_norm_");
  });
}

TEST(ParameterIdentity, Case09_TiedParametersAreOneAndOrphansStayWithoutGradient) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    auto tie = [](FormulaImpl& model) {
      model.register_parameter("same", model.w[0]);
      model.w[1] = model.w[0];  // w1 stays registered but is not used any more
    };
    const Body body = [](const Weights& w, at::Tensor x) { return at::linear(at::linear(x, w[0]), w[1]); };
    FormulaImpl plain({{6, 6}, {6, 6}}, body);
    Formula unit({{6, 6}, {6, 6}}, body);
    tie(plain);
    tie(unit);
    fully_shard(unit, resharding(world));
    plain.forward(fixed({4, 6}, 3)).sum().backward();
    unit.forward(fixed({4, 6}, 3)).sum().backward();
    EXPECT_TRUE(at::equal(unit.w[0].grad(), part_like(plain.w[0].grad(), unit.w[0])));
    EXPECT_FALSE(unit.named_parameters()["w1"].grad().defined());
  });
}

TEST(ParameterIdentity, Case10_GradientsFromBeforeFullyShardRaise) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Formula unit({{8, 6}}, linear);
    unit.forward(fixed({4, 6}, 1)).sum().backward();
    contains(message_of([&] { fully_shard(unit, resharding(world)); }),
             "call fully_shard before the first backward, and make the optimizer afterwards");
  });
}

TEST(ParameterIdentity, Case11_AStaleGraphIsNoticed) {
  MEGASHARD_NOT_ON_SIM("a step inside an iteration races with backward's gathers, as in PyTorch");
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{8, 6}}, linear, resharding(world));
    auto forward = [&] { return twins.unit.forward(fixed({4, 6}, 9).requires_grad_()).sum(); };
    at::Tensor loss = forward();
    {
      const c10::NoGradGuard step;
      twins.unit.w[0].add_(1);
    }
    contains(message_of([&] { loss.backward(); }), "modified by an inplace operation");
    loss = forward();
    twins.unit.w[0].unsafeGetTensorImpl()->bump_version();  // as our Optimizer after a fused step
    contains(message_of([&] { loss.backward(); }), "modified by an inplace operation");
    loss = forward();
    loss.backward();
  });
}

TEST(ParameterIdentity, Case11_WritesIntoAGatheredParameterRaise) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins(
        {{8, 6}},
        [](const Weights& w, at::Tensor x) {
          const c10::NoGradGuard no_grad;
          w[0].mul_(0.5);
          return at::linear(x, w[0]);
        },
        resharding(world));
    contains(message_of([&] {
               twins.unit.forward(fixed({4, 6}, 9));
             }),
             "parameter 'w0' was changed in place while it was gathered");
    twins.expect_sharded();
  });
}

TEST(ParameterIdentity, Case12_AnExceptionInBackwardLeavesNothingFullAndNoGradientLost) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}}, linear, resharding(world));
    train_equally(twins);
    const at::Tensor before = twins.unit.w[0].grad().clone();
    const at::Tensor x = fixed({4, 6}, 9).requires_grad_() * 1;
    x.register_hook([](const at::Tensor&) { throw std::runtime_error("a user's hook failed"); });
    contains(message_of([&] { twins.unit.forward(x).sum().backward(); }), "a user's hook failed");
    twins.expect_sharded();
    EXPECT_TRUE(twins.unit.w[0].grad().defined());
    EXPECT_EQ(twins.unit.w[0].grad().sizes(), before.sizes());
    train_equally(twins);
  });
}

TEST(ParameterIdentity, Case13_AUnitFirstUsedUnderInferenceModeTrainsLater) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    auto options = resharding(world);
    options.mixed_precision.param_dtype = at::kBFloat16;
    Twins twins({{5, 6}}, linear, options);
    {
      const c10::InferenceMode inference;
      twins.unit.forward(fixed({4, 6}, 2).to(at::kBFloat16));
    }
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = fixed({4, 6}, 9).to(at::kBFloat16);
      twins.plain.forward(x).sum().backward();
      twins.unit.forward(x).sum().backward();
      twins.expect_equal_gradients();
    }
  });
}

}  // namespace
}  // namespace megashard::testing
