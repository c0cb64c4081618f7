// Tests of PyTorch's FSDP2 suite that need a GPU: devices of states and inputs, and the allocator's peaks
// (test_fully_shard_memory.py). One GPU is enough: the other ranks belong to a fake group. Skipped without a GPU;
// tests/gpu runs them.

#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/optim/adam.h>

#include <filesystem>

#include "parallel/collectives/fake_process_group.h"
#include "parallel/device/cuda_module.h"
#include "parallel/fsdp/detail/fsdp_context.h"
#include "tests/support/chain.h"
#include "tests/support/default_device.h"
#include "tests/support/parity.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

bool has_gpu() {
#ifdef MEGASHARD_TEST_CUDA
  return load_cuda_module().device_count() > 0;
#else
  return false;
#endif
}

const at::Device kGpu(at::kCUDA, 0);

class OnGpu : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU on this machine";
    if (on_simulated_device()) set_default_device_of_tests(at::kCPU);  // these name their devices
  }
  void TearDown() override {
    if (on_simulated_device()) set_default_device_of_tests(at::kCUDA);
  }
  static DeviceMeshPtr mesh() {
    return flat_mesh(make_fake_group({.rank = 0, .world_size = 2, .device_type = at::kCUDA}));
  }
};

class FullyShardInit : public OnGpu {};
class FullyShardTraining : public OnGpu {};
class FullyShardMemory : public OnGpu {};
INSTANTIATE_TEST_SUITE_P(Cuda, FullyShardInit, ::testing::Values(0));
INSTANTIATE_TEST_SUITE_P(Cuda, FullyShardTraining, ::testing::Values(0));
INSTANTIATE_TEST_SUITE_P(Cuda, FullyShardMemory, ::testing::Values(0));

TEST_P(FullyShardInit, test_move_states_to_device_tensor) {
  Chain chain;
  const at::Tensor buffer = chain.root.register_buffer("buffer", at::empty({3}));
  chain.shard({.mesh = mesh()});
  for (const auto& w : chain.root.parameters()) {
    EXPECT_EQ(w.device(), kGpu);
    EXPECT_EQ(reshard_and_view(w).local.device(), kGpu);
  }
  EXPECT_EQ(buffer.device(), kGpu);
}

struct NestedImpl : torch::nn::Module {
  NestedImpl() : w(register_parameter("w", fixed({6, 6}, 1))) {}
  at::Tensor forward(at::Tensor x, std::vector<std::pair<int, at::Tensor>> more) {
    devices = {x.device(), more.at(0).second.device()};
    return at::linear(x + more[0].second, w);
  }
  at::Tensor w;
  std::vector<at::Device> devices;
};

TEST_P(FullyShardTraining, test_root_move_forward_input_to_device) {
  Hooked<NestedImpl> model;
  fully_shard(model, {.mesh = mesh()});
  const at::Tensor y = model.forward(fixed({4, 6}, 1), {{1, fixed({4, 6}, 2)}});
  EXPECT_EQ(model.devices, (std::vector<at::Device>{kGpu, kGpu}));
  y.sum().backward();
  EXPECT_EQ(model.w.grad().device(), kGpu);
}

TEST_P(FullyShardTraining, test_post_optim_event) {
  std::vector<at::Tensor> losses[2];
  for (const bool with_event : {false, true}) {
    Chain chain;
    chain.shard({.mesh = mesh()});
    const CommStreams streams(kGpu);
    const at::Tensor x = fixed({4, 6}, 1).to(kGpu);
    for (int step = 0; step < 5; ++step) {
      chain.root.zero_grad();
      losses[with_event].push_back(chain.root.forward(x).sum());
      losses[with_event].back().backward();
      descend(chain.root, 1e-4);
      if (with_event) set_post_optim_event(chain.root, StreamEvent::record(streams.current()));
    }
  }
  for (size_t step = 0; step < 5; ++step) EXPECT_TRUE(at::equal(losses[0][step], losses[1][step])) << step;
}

/// A graph of what a function enqueued (cuda_graph.cpp).
class CapturedGraph {
 public:
  explicit CapturedGraph(std::function<void()> work) : calls_(calls_of_device()) {
    graph_ = calls_.capture([](void* run) { (*static_cast<std::function<void()>*>(run))(); }, &work);
  }
  ~CapturedGraph() { calls_.free(graph_); }
  CapturedGraph(const CapturedGraph&) = delete;
  void replay() { calls_.replay(graph_); }

 private:
  struct Calls {
    void* (*capture)(void (*work)(void*), void* argument);
    void (*replay)(void* graph);
    void (*free)(void* graph);
  };
  static Calls calls_of_device() {
    if (on_simulated_device()) {
      const auto& device = simulated_device();
      return {device.capture_graph, device.replay_graph, device.free_graph};
    }
    const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    void* module = dlopen((folder / "libtest_cuda_graph.so").c_str(), RTLD_NOW);
    TORCH_CHECK(module != nullptr, dlerror());
    Calls calls{};
    calls.capture = reinterpret_cast<decltype(calls.capture)>(dlsym(module, "capture_cuda_graph"));
    calls.replay = reinterpret_cast<decltype(calls.replay)>(dlsym(module, "replay_cuda_graph"));
    calls.free = reinterpret_cast<decltype(calls.free)>(dlsym(module, "free_cuda_graph"));
    return calls;
  }

  Calls calls_;
  void* graph_;
};

TEST_P(FullyShardTraining, test_two_layer_fully_shard_cudagraph) {
  Chain captured(2), eager(2);
  captured.shard({.mesh = mesh()});
  eager.shard({.mesh = mesh()});
  // Autograd nodes keep the stream they were created on, so the warm-up's stream is the capture's.
  c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const c10::Stream own = guard.getStreamFromGlobalPool(kGpu);
  order_streams(guard.getStream(kGpu), own);
  const StreamScope scope(own);
  at::Tensor x = fixed({4, 6}, 1).to(kGpu);
  const auto step = [&x](Chain& chain) { chain.root.forward(x).sum().backward(); };
  for (int i = 0; i < 3; ++i) {  // allocates everything that stays
    step(captured);
    captured.root.zero_grad();
  }
  CapturedGraph graph([&] { step(captured); });
  for (uint64_t seed = 2; seed < 5; ++seed) {
    x.copy_(fixed({4, 6}, seed));
    graph.replay();
    eager.root.zero_grad();
    step(eager);
    const auto expected = eager.root.named_parameters();
    for (const auto& item : captured.root.named_parameters())
      EXPECT_TRUE(at::equal(item.value().grad(), expected[item.key()].grad())) << item.key();
  }
}

/// The hook runs on its own stream after the reduction, and work after backward waits for it.
TEST_P(FullyShardInit, test_custom_hook_custom_stream) {
  const c10::Stream own = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(kGpu);
  Chain plain, hooked;
  plain.shard({.mesh = mesh()});
  hooked.shard({.mesh = mesh()});
  const CommStreams streams(kGpu);
  int calls = 0;
  const auto hook = [&](at::Tensor& reduced) {
    EXPECT_EQ(streams.current(), own);
    for (int i = 0; i < 1000; ++i) reduced.add_(1).sub_(1);  // long enough to be overtaken
    reduced.mul_(2);
    ++calls;
  };
  set_all_reduce_hook(hooked.root, hook, own);
  for (auto& unit : hooked.units) set_all_reduce_hook(*unit, hook, own);
  const at::Tensor x = at::ones({4, 6}, kGpu);
  plain.root.forward(x).sum().backward();
  hooked.root.forward(x).sum().backward();
  EXPECT_EQ(calls, 4);
  const auto expected = plain.root.named_parameters();
  for (const auto& item : hooked.root.named_parameters()) {
    // Adding and subtracting again rounds.
    EXPECT_TRUE(at::allclose(item.value().grad(), expected[item.key()].grad() * 2, 1e-3, 1e-3)) << item.key();
  }
}

// Peaks. Two ranks, fp32: `block` is one unit's weights; there are six units, and the root has as much. A rank keeps
// half of each.

constexpr int kUnits = 6;
constexpr int64_t kWidth = 2048;
constexpr int64_t kBlock = kWidth * kWidth * 4;  // bytes
constexpr int64_t kSharded = (kUnits + 1) * kBlock / 2;
constexpr int64_t kSlack = 4 << 20;  // inputs, activations of four rows, the allocator's rounding

const c10::CachingDeviceAllocator::Stat& allocated() {
  static thread_local c10::CachingDeviceAllocator::DeviceStats stats;
  stats = at::getDeviceAllocator(at::kCUDA)->getDeviceStats(0);
  return stats.allocated_bytes[0];
}
int64_t now() { return allocated().current; }
int64_t peak() { return allocated().peak; }
void reset_peak() { at::getDeviceAllocator(at::kCUDA)->resetPeakStats(0); }

/// Allocates the matrix library's workspace before anything is measured.
int64_t base_memory() {
  {
    const at::Tensor x = fixed({4, 64}, 1).to(kGpu).requires_grad_();
    at::linear(x, fixed({64, 64}, 2).to(kGpu).requires_grad_()).sum().backward();
  }
  return now();
}

TEST_P(FullyShardMemory, test_fully_shard_training_memory) {
  for (const bool reshard : {true, false}) {
    const int64_t base = base_memory();
    reset_peak();
    Chain chain(kUnits, kWidth);
    chain.shard({.mesh = mesh(), .reshard_after_forward = reshard});
    const auto used = [&] { return now() - base; };
    const auto most = [&] { return peak() - base; };
    EXPECT_LE(most(), kSharded + kBlock + kSlack) << "construction";
    torch::optim::Adam optimizer(chain.root.parameters(), 1e-3);
    const at::Tensor x = fixed({4, kWidth}, 1).to(kGpu);
    for (int step = 0; step < 3; ++step) {
      const int64_t states = step == 0 ? 0 : 2 * kSharded;  // Adam's two moments
      reset_peak();
      at::Tensor loss = chain.root.forward(x).sum();
      EXPECT_LE(most(),
                states + kSlack + (reshard ? 3 * kBlock + kBlock + kSharded : kSharded + 2 * kSharded + 2 * kBlock))
          << "forward";
      reset_peak();
      loss.backward();
      EXPECT_LE(most(), states + kSlack + (reshard ? 4 * kBlock + kBlock + 2 * kSharded : 4 * kSharded + 3 * kBlock))
          << "backward";
      EXPECT_LE(used(), states + 2 * kSharded + kSlack) << "after backward";
      optimizer.step();
      EXPECT_LE(used(), 4 * kSharded + kSlack) << "after the optimizer's step";
      optimizer.zero_grad();
      EXPECT_LE(used(), 3 * kSharded + kSlack) << "after zero_grad";
    }
  }
}

TEST_P(FullyShardMemory, test_fully_shard_training_memory_no_gc) {
  Chain chain(kUnits, kWidth);
  chain.shard({.mesh = mesh()});
  const at::Tensor x = fixed({4, kWidth}, 1).to(kGpu);
  int64_t after_second = 0;
  for (int step = 0; step < 10; ++step) {
    chain.root.zero_grad();
    chain.root.forward(x).sum().backward();
    if (step == 1) after_second = now();
  }
  EXPECT_LE(now() - after_second, 2 << 20);
}

TEST_P(FullyShardMemory, test_fully_shard_del_memory) {
  const int64_t base = base_memory();
  {
    Chain chain(kUnits, kWidth);
    chain.shard({.mesh = mesh()});
    const at::Tensor x = fixed({4, kWidth}, 1).to(kGpu);
    for (int step = 0; step < 2; ++step) chain.root.forward(x).sum().backward();
    EXPECT_GE(now() - base, 2 * kSharded);
  }
  EXPECT_EQ(now(), base);
}

}  // namespace
}  // namespace megashard::testing
