// Replicas of shards (HSDP), also with CPU offload. PyTorch has these in test_fully_shard_extensions.py and
// _training.py.

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/support/model_pairs.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

TEST(FullyShardTraining, test_train_parity_multi_group_cpu_offload_eager) {
  MEGASHARD_SIM_ONLY();
  for (const bool pin : {true, false}) {
    for (const ReshardAfterForward reshard : {true, false}) {
      run_ranks(2, [&](const ProcessGroupPtr& world) {
        Chain plain, chain;
        FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = reshard};
        options.cpu_offload = CpuOffloadPolicy{.pin_memory = pin};
        chain.shard(options);
        expect_chain_parity(plain, chain, *world);
      });
    }
  }
}

void expect_hybrid_parity(FullyShardOptions options, bool async_op) {
  for (const ReshardAfterForward reshard : {true, false}) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      Chain plain, chain;
      auto here = options;
      here.mesh = two_by_two(world);
      here.reshard_after_forward = reshard;
      chain.shard(here);
      if (async_op) set_unshard_async_op(chain.root, true);
      // A different rank is late each time.
      chain.units[1]->body = [&](const Weights& w, at::Tensor x) {
        if (world->rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return at::linear(x, w[0]);
      };
      // Averaged in two steps, so later steps start from weights that differ in the last bit.
      expect_chain_parity(plain, chain, *world, 1e-5);
    });
  }
}

/// Also records where its all-reduces are waited for.
class WaitNotingGroup final : public RecordingGroup {
 public:
  using RecordingGroup::RecordingGroup;
  Work all_reduce(at::Tensor tensor, ReduceOp op) override {
    struct Noted final : Work::Task {
      WaitNotingGroup* group;
      at::Tensor tensor;
      Work work;
      void finish() override {
        group->note("all_reduce waited for", tensor);
        work.wait();
      }
    };
    const auto noted = std::make_shared<Noted>();
    noted->group = this;
    noted->tensor = tensor;
    noted->work = RecordingGroup::all_reduce(tensor, op);
    return Work(noted);
  }
};

TEST(FullyShardExtensions, ReduceScattersDoNotWaitForOlderAllReduces) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    const DeviceMeshPtr mesh = two_by_two(world);
    const std::vector<ProcessGroupPtr> groups = {std::make_shared<WaitNotingGroup>(mesh->group(0), calls),
                                                 std::make_shared<RecordingGroup>(mesh->group(1), calls)};
    Chain chain;
    chain.shard({.mesh = std::make_shared<DeviceMesh>(groups, std::vector<std::string>{"replicate", "shard"})});
    chain.backward(chain.forward());
    const auto of = [](const char* operation) { return [=](const auto& call) { return call.operation == operation; }; };
    const auto first_wait = std::ranges::find_if(calls, of("all_reduce waited for"));
    EXPECT_EQ(std::count_if(calls.begin(), first_wait, of("reduce_scatter")), 4);
    EXPECT_EQ(std::count_if(first_wait, calls.end(), of("all_reduce waited for")), 4);
  });
}

TEST(FullyShardExtensions, test_hsdp_train_parity_multi_group) { expect_hybrid_parity({}, false); }

TEST(FullyShardExtensions, test_hsdp_train_parity_cpu_offload_eager) {
  MEGASHARD_SIM_ONLY();
  for (const bool pin : {true, false}) {
    FullyShardOptions options;
    options.cpu_offload = CpuOffloadPolicy{.pin_memory = pin};
    expect_hybrid_parity(options, false);
  }
}

TEST(FullyShardExtensions, test_hsdp_train_parity_multi_group_unshard_async_op) { expect_hybrid_parity({}, true); }

}  // namespace
}  // namespace megashard::testing
