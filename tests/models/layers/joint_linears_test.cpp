// Linear layers with the same input: one product if their weights are adjacent, with the results of separate layers.

#include <ATen/ops/allclose.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>

#include "models/layers/linear.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/guarded_tensor.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

constexpr int64_t kIn = 32;
constexpr std::array<int64_t, 3> kOut{48, 16, 17};  // the last one's rows are sharded unevenly and do not fill vectors

struct ThreeImpl : torch::nn::Module {
  explicit ThreeImpl(bool bias) {
    for (size_t i = 0; i < kOut.size(); ++i) {
      auto layer = std::make_shared<Hooked<ColumnParallelLinear>>(
          Linear::Options{.in = kIn, .out = kOut[i], .bias = bias}, std::make_shared<TensorParallelRanks>());
      const at::NoGradGuard no_grad;
      layer->weight.copy_(fixed({kOut[i], kIn}, i));
      if (bias) layer->bias.copy_(fixed({kOut[i]}, 10 + i));
      layers.push_back(register_module("layer" + std::to_string(i), layer));
    }
    joint = JointLinears(layers);
  }
  std::vector<at::Tensor> forward(at::Tensor x) {
    if (one_by_one) return {layers[0]->forward(x), layers[1]->forward(x), layers[2]->forward(x)};
    joined = can_join(x, std::vector<at::Tensor>{layers[0]->weight, layers[1]->weight, layers[2]->weight});
    return joint.forward(x);
  }

  JointLinears::Layers layers;
  JointLinears joint;
  bool one_by_one = false, joined = false;
};
using Three = Hooked<ThreeImpl>;

/// Outputs, gradients of the input, and gradients of this rank's rows of all parameters.
std::vector<at::Tensor> run(Three& model, const c10::Device& device, at::ScalarType dtype) {
  const auto x = fixed({2, 5, kIn}, 30).to(device, dtype).requires_grad_();
  const auto outputs = model.forward(x);
  std::vector<at::Tensor> found;
  at::Tensor loss;
  for (size_t i = 0; i < outputs.size(); ++i) {
    found.push_back(outputs[i].detach().clone());
    const auto term = (outputs[i] * fixed({2, 5, kOut[i]}, 40 + i).to(device, dtype)).sum();
    loss = loss.defined() ? loss + term : term;
  }
  model.zero_grad();
  loss.backward();
  found.push_back(x.grad());
  for (const auto& parameter : model.parameters()) {
    if (parameter.requires_grad()) found.push_back(unguarded(parameter.grad()).clone());
  }
  return found;
}

/// Tolerance: sums of 16 to 81 products in another order, a few roundings of the largest value.
double bar_of(at::ScalarType dtype) { return dtype == at::kFloat ? 2e-6 : dtype == at::kHalf ? 4e-3 : 3e-2; }

void expect_the_same(const ProcessGroupPtr& world, bool bias, at::ScalarType dtype, bool frozen = false) {
  Three model(bias);
  if (frozen) model.layers[1]->weight.set_requires_grad(false);
  FullyShardOptions options = resharding(world);
  if (dtype != at::kFloat) options.mixed_precision.param_dtype = dtype;
  fully_shard(model, options);
  const auto device = options.mesh->device();
  const auto joint = run(model, device, dtype);
  EXPECT_TRUE(model.joined);
  model.one_by_one = true;
  const auto alone = run(model, device, dtype);
  ASSERT_EQ(joint.size(), alone.size());
  for (size_t i = 0; i < joint.size(); ++i) {
    if (joint[i].numel() == 0) continue;
    const double largest = alone[i].abs().max().item<double>();
    EXPECT_LE((joint[i] - alone[i]).abs().max().item<double>(), bar_of(dtype) * largest) << dtype << " " << i;
  }
}

TEST(JointLinears, OneProductHasTheNumbersOfThree) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const bool bias : {false, true}) expect_the_same(world, bias, dtype);
    }
    expect_the_same(world, false, at::kFloat, /*frozen=*/true);
  });
}

TEST(JointLinears, AnAdapterTakesThemApart) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Three model(false), plain(false);
    for (auto* each : {&model, &plain}) each->layers[1]->add_adapters({""}, 2, 1.0, 0.0);
    for (auto* each : {&model, &plain}) {
      const at::NoGradGuard no_grad;
      const auto* adapter = each->layers[1]->linear_layers()[0].adapter;
      adapter->lora_b.copy_(fixed({kOut[1], 2}, 50));
      adapter->lora_a.copy_(fixed({2, kIn}, 51));
    }
    fully_shard(model, resharding(world));
    const auto x = fixed({2, 5, kIn}, 30).to(model.layers[0]->weight.device());
    plain.to(x.device());
    plain.one_by_one = true;
    const auto expected = plain.forward(x), found = model.forward(x);
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], expected[i])) << i;
  });
}

TEST(JointLinears, GradientsThatAreColumnsOfOneTensorAreNotCopied) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Three model(false);
    fully_shard(model, resharding(world));
    const auto device = model.layers[0]->weight.device();
    const auto x = fixed({5, kIn}, 30).to(device).requires_grad_();
    const auto grads = fixed({5, 81}, 31).to(device);
    const auto columns = grads.split_with_sizes({48, 16, 17}, 1);
    const auto of_columns = torch::autograd::grad(model.forward(x), {x}, columns)[0];
    std::vector<at::Tensor> dense;
    for (const auto& each : columns) dense.push_back(each.contiguous());
    EXPECT_TRUE(at::equal(of_columns, torch::autograd::grad(model.forward(x), {x}, dense)[0]));
  });
}

}  // namespace
}  // namespace megashard::testing
