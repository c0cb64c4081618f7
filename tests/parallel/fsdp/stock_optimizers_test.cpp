// Stock optimizers on sharded parameters, empty shards included: they see local rows and step like on the whole. (The
// torch/optim headers are slow to compile: keep them in this file.)

#include <ATen/ops/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using torch::optim::Optimizer;
using Make = std::function<std::unique_ptr<Optimizer>(const std::vector<at::Tensor>&)>;

at::Tensor linear_with_bias(const Weights& w, at::Tensor x) { return at::linear(x, w[0], w[1]); }

struct OptimizerCase {
  const char* name;
  Make make;
};

class StockOptimizers : public ::testing::TestWithParam<OptimizerCase> {};

TEST_P(StockOptimizers, StepLocalRowsAsTheWhole) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}, {5}}, linear_with_bias, {.mesh = flat_mesh(world)});  // rows 2, 2, 1 and none
    const auto plain = GetParam().make(twins.plain.parameters());
    const auto sharded = GetParam().make(twins.unit.parameters());
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = fixed({4, 6}, 10 + step);
      plain->zero_grad();
      sharded->zero_grad();
      twins.plain.forward(x).pow(2).sum().backward();
      twins.unit.forward(x).pow(2).sum().backward();
      twins.expect_equal_gradients();
      plain->step();
      sharded->step();
      for (size_t i = 0; i < 2; ++i) {
        const auto local = reshard_and_view(twins.unit.w[i]).local;
        EXPECT_TRUE(at::equal(local, part_like(twins.plain.w[i], twins.unit.w[i]))) << "step " << step;
      }
    }
  });
}

template <class Kind, class Options>
Make maker(Options options) {
  return [options](const std::vector<at::Tensor>& parameters) { return std::make_unique<Kind>(parameters, options); };
}

INSTANTIATE_TEST_SUITE_P(
    All, StockOptimizers,
    ::testing::Values(
        OptimizerCase{"SGD", maker<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9))},
        OptimizerCase{"AdamW", maker<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01).weight_decay(0.1))},
        OptimizerCase{"Adam", maker<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true))},
        OptimizerCase{"RMSprop", maker<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).momentum(0.5))},
        OptimizerCase{"Adagrad", maker<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.01))}),
    [](const auto& info) { return info.param.name; });

TEST(ParameterIdentity, Case08_OptimizersThatFlattenAllGradientsRaise) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}, {5}}, linear_with_bias, {.mesh = flat_mesh(world)});
    torch::optim::LBFGS optimizer(twins.unit.parameters());
    auto closure = [&] {
      optimizer.zero_grad();
      const auto loss = twins.unit.forward(fixed({4, 6}, 1)).pow(2).sum();
      loss.backward();
      return loss;
    };
    contains(message_of([&] { optimizer.step(closure); }), "LBFGS");
  });
}

TEST(ParameterIdentity, Case09_TiedParametersInStockOptimizersStepAsInPlainTorch) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    auto tied = [](FormulaImpl& model) { model.register_parameter("same", model.w[0]); };
    FormulaImpl plain({{5, 6}, {5}}, linear_with_bias);
    Formula unit({{5, 6}, {5}}, linear_with_bias);
    tied(plain);
    tied(unit);
    fully_shard(unit, {.mesh = flat_mesh(world)});
    torch::optim::SGD expected(plain.parameters(), 0.1), optimizer(unit.parameters(), 0.1);
    plain.forward(fixed({4, 6}, 1)).sum().backward();
    unit.forward(fixed({4, 6}, 1)).sum().backward();
    expected.step();  // C++ lists a tied parameter twice and steps it twice; this library's Optimizer once
    optimizer.step();
    EXPECT_TRUE(at::equal(reshard_and_view(unit.w[0]).local, part_like(plain.w[0], unit.w[0])));
  });
}

TEST(ParameterIdentity, Case10_StateFromBeforeFullyShardRaises) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Formula unit({{5, 6}, {5}}, linear_with_bias);
    torch::optim::AdamW optimizer(unit.parameters(), 0.1);
    auto train = [&] {
      optimizer.zero_grad();
      unit.forward(fixed({4, 6}, 1)).sum().backward();
      optimizer.step();
    };
    train();
    optimizer.zero_grad();
    fully_shard(unit, {.mesh = flat_mesh(world)});
    contains(message_of(train), "size");
  });
}

TEST(ParameterIdentity, Case11_AnOptimizersStepMakesOlderGraphsStale) {
  MEGASHARD_NOT_ON_SIM("a step inside an iteration races with backward's gathers, as in PyTorch");
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}, {5}}, linear_with_bias, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    torch::optim::AdamW optimizer(twins.unit.parameters(), 0.1);
    twins.unit.forward(fixed({4, 6}, 1)).sum().backward();
    const auto stale = twins.unit.forward(fixed({4, 6}, 1).requires_grad_()).sum();
    optimizer.step();
    contains(message_of([&] { stale.backward(); }), "modified by an inplace operation");
  });
}

}  // namespace
}  // namespace megashard::testing
