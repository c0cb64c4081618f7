// Host cost of fully_shard, where no collective takes time: the twin of fsdp2_unit_cost.py, which
// says what is measured. One JSON line. `unit_cost --count CALLS` calls a step without units, one
// with them, and clipping with AdamW so often each, in functions of their own for tools that count
// instructions, and says how often a call asked for memory.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <string_view>
#include <thread>

#include "framework/training/optimizers/optimizer.h"
#include "parallel/collectives/fake_process_group.h"
#include "parallel/fsdp/fully_shard.h"

namespace {
int64_t allocations = 0;
}  // namespace

// The C library's, which count here.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  ++allocations;
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  ++allocations;
  return __libc_calloc(count, bytes);
}
int posix_memalign(void** block, size_t alignment, size_t bytes) {
  ++allocations;
  *block = __libc_memalign(alignment, bytes);
  return *block == nullptr ? ENOMEM : 0;
}
}

namespace megashard {
namespace {

using Call = std::function<void()>;

constexpr int kUnits = 8;
constexpr int kLayers = 5;

/// Microseconds of a call: the fastest of several averages, which is the one that nothing
/// disturbed.
double best_us(const Call& work, int calls, int repeats = 7) {
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

FullyShardOptions on(DeviceMeshPtr mesh) {
  FullyShardOptions options;
  options.mesh = std::move(mesh);
  return options;
}

/// Forward and backward of all units, sharded or not.
Call step(const DeviceMeshPtr& mesh, bool sharded) {
  const auto model = std::make_shared<Hooked<Chains>>();
  if (sharded) {
    for (auto& unit : model->units) fully_shard(*unit, on(mesh));
    fully_shard(*model, on(mesh));
  }
  const auto x = at::ones({4, 16}).requires_grad_();
  return [model, x, gradient = at::ones({4, 16}), parameters = model->parameters()] {
    model->forward(x).backward(gradient);
    x.mutable_grad().reset();
    for (const auto& parameter : parameters) parameter.mutable_grad().reset();
  };
}

struct Weights : torch::nn::Module {
  Weights() {
    for (int i = 0; i < 128; ++i) register_parameter("w" + std::to_string(i), at::ones({32, 32}));
  }
  at::Tensor forward(at::Tensor x) { return x; }
};

Call clip_adamw(const DeviceMeshPtr& mesh) {
  const auto module = std::make_shared<Hooked<Weights>>();
  fully_shard(*module, on(mesh));
  NamedTensors named;
  for (const auto& item : module->named_parameters()) {
    item.value().mutable_grad() = at::ones({16, 32});
    named.emplace_back(item.key(), item.value());
  }
  const std::shared_ptr<Optimizer> optimizer = make_optimizer(named, {});
  return [module, optimizer] {
    optimizer->clip_grad_norm(1.0);
    optimizer->step();
  };
}

}  // namespace

template <char kWhat>
[[gnu::noinline]] void counted(const Call& work, int calls) {
  for (int i = 0; i < calls; ++i) work();
}

/// What a call asks of the C library's heap, after some to warm up.
template <char kWhat>
double allocations_of(const Call& work, int calls) {
  for (int i = 0; i < 3; ++i) work();
  const int64_t before = allocations;
  counted<kWhat>(work, calls);
  return static_cast<double>(allocations - before) / calls;
}

/// In threads of their own, whose heap is empty when they start: what the C library's malloc does, and in how many
/// instructions, depends on what was asked of it before.
void count(const DeviceMeshPtr& mesh, int calls) {
  double plain = 0;
  double units = 0;
  double clip = 0;
  std::thread([&] { plain = allocations_of<'p'>(step(mesh, false), calls); }).join();
  std::thread([&] { units = allocations_of<'u'>(step(mesh, true), calls); }).join();
  std::thread([&] { clip = allocations_of<'c'>(clip_adamw(mesh), calls); }).join();
  std::cout << "{\"unit\": " << (units - plain) / kUnits << ", \"clip_adamw\": " << clip << "}\n";
}

}  // namespace megashard

int main(int argc, char** argv) {
  using namespace megashard;
  at::set_num_threads(1);
  const auto mesh = std::make_shared<DeviceMesh>(make_fake_group({.world_size = 2}), std::vector<int>{2});
  if (argc == 3 && std::string_view(argv[1]) == "--count") {
    count(mesh, std::atoi(argv[2]));
    return 0;
  }
  const double unit_us = (best_us(step(mesh, true), 30) - best_us(step(mesh, false), 30)) / kUnits;
  std::cout << "{\"unit_us\": " << unit_us << ", \"clip_adamw_us\": " << best_us(clip_adamw(mesh), 20) << "}\n";
}
