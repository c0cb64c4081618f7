#include "framework/training/state_offload.h"

#include <ATen/ops/equal.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "framework/process_group/gpu_device.h"
#include "parallel/collectives/device_mesh.h"
#include "parallel/collectives/fake_process_group.h"
#include "parallel/device/streams.h"
#include "tests/support/formula.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;

constexpr auto kModel = StateKinds::kModelParams, kOptimizer = StateKinds::kOptimizerStates;

/// A model under fully_shard and its optimizer.
struct Worker {
  explicit Worker(const FullyShardOptions& options, at::ScalarType stored = at::kFloat)
      : model(std::make_shared<Stack>(2, 6, 10)), device(options.mesh->device()) {
    uint64_t seed = 1;
    for (auto& parameter : model->parameters()) parameter.set_data(fixed(parameter.sizes(), seed++));
    model->register_buffer("scale", fixed({3}, 50));
    model->to(device, stored);
    shard_stack(*model, options);
    NamedTensors named;
    for (const auto& item : model->named_parameters()) named.emplace_back(item.key(), item.value());
    optimizer = make_optimizer(named, {.lr = 1e-2});
  }

  at::Tensor forward(int step) {
    const auto x = fixed({4, 6}, 100 + step).to(device, model->parameters()[0].scalar_type());
    return model->forward(x).square().sum();
  }
  double train(int step) {
    const auto loss = forward(step);
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    return loss.item<double>();
  }

  std::shared_ptr<Stack> model;
  std::unique_ptr<Optimizer> optimizer;
  c10::Device device;
};

DeviceMeshPtr mesh_of(const ProcessGroupPtr& world) {
  return std::make_shared<DeviceMesh>(world, std::vector<int>{world->size()}, std::vector<std::string>{"Shard"});
}

struct Case {
  const char* name;
  int ranks = 2;
  ReshardAfterForward reshard = true;
  at::ScalarType stored = at::kFloat;
  bool optimizer_states_stay = true;
};

/// Tensors by what makes them the same ones.
std::map<const c10::TensorImpl*, const c10::StorageImpl*> identities(Worker& worker) {
  std::map<const c10::TensorImpl*, const c10::StorageImpl*> all;
  const auto add = [&](const at::Tensor& tensor) {
    all[tensor.unsafeGetTensorImpl()] = tensor.storage().unsafeGetStorageImpl();
  };
  for (const auto& parameter : worker.model->parameters()) add(parameter);
  for (const auto& [name, piece] : worker.optimizer->sharded_state_dict()) add(piece.local);
  return all;
}

TEST(StateOffload, TurnsOfTrainingAndInferenceChangeNoBit) {
  const Case cases[] = {{"plain"},
                        {"one rank", 1},
                        {"nothing is resharded", 2, false},
                        {"the root stays", 2, ReshardAfterForward{}},
                        {"copies in the optimizer", 2, true, at::kBFloat16, false},
                        {"all states move", 2, true, at::kFloat, false}};
  for (const auto& each : cases) {
    SCOPED_TRACE(each.name);
    run_ranks(each.ranks, [&](const ProcessGroupPtr& world) {
      const FullyShardOptions options{.mesh = mesh_of(world), .reshard_after_forward = each.reshard};
      Worker plain(options, each.stored), turns(options, each.stored);
      StateOffload states(*turns.model, turns.optimizer.get(),
                          {.device = world->device(), .optimizer_states_stay = each.optimizer_states_stay});
      for (int step = 0; step < 3; ++step) {
        double loss = 0;
        {
          const LoadedStates loaded(states, StateKinds::kModelParams | StateKinds::kOtherParams);
          loss = turns.train(step);
        }
        EXPECT_EQ(loss, plain.train(step)) << step;
        const auto before = identities(turns);
        states.offload_states();
        EXPECT_EQ(states.is_loaded(kModel), false);
        EXPECT_EQ(states.is_loaded(kOptimizer), each.optimizer_states_stay);
        EXPECT_GT(states.host_bytes(), 0);
        EXPECT_EQ(identities(turns), before) << "every tensor is the one it was";
        const at::NoGradGuard no_grad;
        const LoadedStates loaded(states, kModel);
        EXPECT_TRUE(states.is_loaded(StateKinds::kAll)) << "the optimizer's come with any load";
        EXPECT_EQ(states.host_bytes(), 0);
        EXPECT_TRUE(at::equal(turns.forward(9), plain.forward(9)));
      }
    });
  }
}

TEST(StateOffload, UseOfOffloadedStatesIsAnError) {
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    Worker worker({.mesh = mesh_of(world)});
    StateOffload states(*worker.model, worker.optimizer.get(), {.device = world->device()});
    worker.train(0);
    const auto loss = worker.forward(1);  // its graph is alive meanwhile
    states.offload_states(kModel);
    states.offload_states(kModel);  // twice is once
    const auto message = HasSubstr("model_params are offloaded to host memory: call "
                                   "StateOffload::load_states before a forward");
    EXPECT_THAT(message_of([&] { worker.forward(2); }), message);
    states.load_states(kModel);
    states.load_states();
    loss.backward();
    worker.optimizer->step();
    EXPECT_GT(worker.train(2), 0);
  });
}

TEST(StateOffload, GradientsTravelWithTheirParameters) {
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    Worker plain({.mesh = mesh_of(world)}), turns({.mesh = mesh_of(world)});
    StateOffload states(*turns.model, turns.optimizer.get(), {.device = world->device()});
    for (auto* worker : {&plain, &turns}) {
      worker->forward(0).backward();
      if (worker == &turns) {
        const auto gradient = worker->model->parameters()[0].grad();
        states.offload_states(kModel);
        EXPECT_THAT(message_of([&] { gradient.clone(); }), HasSubstr("are offloaded"));
        states.load_states(kModel);
      }
      worker->forward(1).backward();
      worker->optimizer->step();
      worker->optimizer->zero_grad();
    }
    EXPECT_EQ(turns.train(2), plain.train(2));
    turns.forward(3).backward();
    states.offload_states(kModel);
    turns.optimizer->zero_grad();  // while they are away
    states.load_states(kModel);
    EXPECT_EQ(turns.train(3), plain.train(3));
  });
}

// offload_policy: parameters are fully_shard's, the optimizer's states come and go by name.
TEST(StateOffload, WithAnOffloadPolicyTheOptimizersStatesMoveAlone) {
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    const FullyShardOptions options{.mesh = mesh_of(world), .cpu_offload = CpuOffloadPolicy{.pin_memory = false}};
    Worker plain(options), turns(options);
    StateOffload states(*turns.model, turns.optimizer.get(), {.device = c10::kCPU, .offload_policy = true});
    EXPECT_EQ(turns.train(0), plain.train(0));
    states.offload_states(kModel);
    EXPECT_TRUE(states.is_loaded(StateKinds::kAll));
    states.offload_states();
    EXPECT_FALSE(states.is_loaded(kOptimizer));
    EXPECT_TRUE(states.is_loaded(kModel));
    turns.forward(1).backward();
    EXPECT_THAT(message_of([&] { turns.optimizer->step(); }), HasSubstr("optimizer_states are offloaded"));
    turns.optimizer->zero_grad();
    states.load_states(kModel);
    EXPECT_FALSE(states.is_loaded(kOptimizer)) << "not named";
    states.load_states();
    EXPECT_EQ(turns.train(1), plain.train(1));
    if (world->device().is_cpu()) return;
    StateOffload of_device(*turns.model, turns.optimizer.get(), {.device = world->device(), .offload_policy = true});
    of_device.offload_states();
    EXPECT_EQ(of_device.host_bytes(), 0) << "nothing lies on the device";
    EXPECT_EQ(turns.train(2), plain.train(2));
  });
}

TEST(GpuDevice, AnyGpusFilesAreADriver) {
  const std::filesystem::path empty = ::testing::TempDir() + "devices";
  const auto with = [&](const std::string& name) {
    std::filesystem::remove_all(empty);
    std::filesystem::create_directories(empty);
    std::ofstream(empty / name);
    return has_gpu_files(empty);
  };
  for (const char* name : {"nvidia0", "nvidia3", "nvidia12", "nvidiactl", "dxg"}) EXPECT_TRUE(with(name)) << name;
  for (const char* name : {"nvidia", "nvidia-uvm", "nvidia-modeset", "null"}) EXPECT_FALSE(with(name)) << name;
  EXPECT_FALSE(has_gpu_files(empty / "none"));
}

/// What is left on one stream may come back on another: the host waits both times. Nothing is freed
/// here that a device would wait for by itself.
TEST(StateOffload, StatesComeBackOnAnotherStream) {
  MEGASHARD_SIM_ONLY();
  auto* allocator = c10::getDeviceAllocator(c10::kCUDA);
  const auto reserved = [&] { return allocator->getDeviceStats(0).reserved_bytes[0].current; };
  const c10::Device device(c10::kCUDA, 0);
  const auto world = make_fake_group({.world_size = 2, .device_type = at::kCUDA});
  Worker plain({.mesh = mesh_of(world)}), turns({.mesh = mesh_of(world)});
  StateOffload states(*turns.model, turns.optimizer.get(), {.device = device, .optimizer_states_stay = false});
  const auto side = c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(device);
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(turns.train(step), plain.train(step));
    allocator->emptyCache();
    states.offload_states();
    const int64_t kept = reserved();
    allocator->emptyCache();
    EXPECT_EQ(reserved(), kept);
    {
      const StreamScope scope(side);
      states.load_states();
    }
  }
}

TEST(StateOffload, CudaMemoryFalls) {
  if (!on_simulated_device() && !gpu_present()) GTEST_SKIP() << "not run: no GPU on this machine";
  const auto world = make_fake_group({.rank = 0, .world_size = 2, .device_type = at::kCUDA});
  const auto allocated = [] {
    const auto stats = c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(0);
    return stats.allocated_bytes[0].current;
  };
  Worker plain({.mesh = mesh_of(world)}), turns({.mesh = mesh_of(world)});
  StateOffload states(*turns.model, turns.optimizer.get(), {.device = {c10::kCUDA, 0}, .optimizer_states_stay = false});
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(turns.train(step), plain.train(step));
    const int64_t before = allocated();
    states.offload_states();
    EXPECT_LE(allocated(), before - states.host_bytes());
    EXPECT_GT(states.host_bytes(), 0);
    EXPECT_THAT(message_of([&] { turns.forward(9); }), HasSubstr("are offloaded"));
    states.load_states();
    EXPECT_LE(allocated(), before);
  }
}

}  // namespace
}  // namespace megashard::testing
