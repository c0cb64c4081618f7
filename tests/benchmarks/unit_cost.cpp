// Host cost of fully_shard, where no collective takes time: the twin of fsdp2_unit_cost.py, which
// says what is measured. One JSON line.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <limits>

#include "framework/training/optimizer.h"
#include "parallel/collectives/fake_process_group.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

constexpr int kUnits = 8;
constexpr int kLayers = 5;

/// Microseconds of a call: the fastest of several averages, which is the one that nothing
/// disturbed.
template <class Work>
double best_us(Work work, int calls, int repeats = 7) {
  for (int i = 0; i < calls; ++i) work();
  double best = std::numeric_limits<double>::max();
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) work();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    best = std::min(best, took.count() / calls);
  }
  return best;
}

struct Chain : torch::nn::Module {
  Chain() {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(16, 16)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

struct Chains : torch::nn::Module {
  Chains() {
    for (int i = 0; i < kUnits; ++i) {
      units.push_back(register_module(std::to_string(i), std::make_shared<Hooked<Chain>>()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& unit : units) x = unit->forward(x);
    return x;
  }
  std::vector<std::shared_ptr<Hooked<Chain>>> units;
};

double step_us(Hooked<Chains>& model) {
  const auto x = at::ones({4, 16}).requires_grad_();
  const auto gradient = at::ones({4, 16});
  const auto parameters = model.parameters();
  return best_us(
      [&] {
        model.forward(x).backward(gradient);
        x.mutable_grad().reset();
        for (const auto& parameter : parameters) parameter.mutable_grad().reset();
      },
      30);
}

FullyShardOptions on(DeviceMeshPtr mesh) {
  FullyShardOptions options;
  options.mesh = std::move(mesh);
  return options;
}

double unit_us(const DeviceMeshPtr& mesh) {
  Hooked<Chains> plain, wrapped;
  for (auto& unit : wrapped.units) fully_shard(*unit, on(mesh));
  fully_shard(wrapped, on(mesh));
  return (step_us(wrapped) - step_us(plain)) / kUnits;
}

struct Weights : torch::nn::Module {
  Weights() {
    for (int i = 0; i < 128; ++i) register_parameter("w" + std::to_string(i), at::ones({32, 32}));
  }
  at::Tensor forward(at::Tensor x) { return x; }
};

double clip_adamw_us(const DeviceMeshPtr& mesh) {
  Hooked<Weights> module;
  fully_shard(module, on(mesh));
  NamedTensors named;
  for (const auto& item : module.named_parameters()) {
    item.value().mutable_grad() = at::ones({16, 32});
    named.emplace_back(item.key(), item.value());
  }
  const auto optimizer = make_optimizer(named, {});
  return best_us(
      [&] {
        optimizer->clip_grad_norm(1.0);
        optimizer->step();
      },
      20);
}

}  // namespace
}  // namespace megashard

int main() {
  using namespace megashard;
  at::set_num_threads(1);
  const auto mesh = std::make_shared<DeviceMesh>(make_fake_group({.world_size = 2}), std::vector<int>{2});
  std::cout << "{\"unit_us\": " << unit_us(mesh) << ", \"clip_adamw_us\": " << clip_adamw_us(mesh) << "}\n";
}
