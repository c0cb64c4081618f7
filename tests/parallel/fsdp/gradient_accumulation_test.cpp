// test_fully_shard_training.py: microbatches, with exact counts of collectives.

#include "tests/support/model_pairs.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

enum class Unsynced { kAll, kRootOnly, kBlocksOnly };

struct AccumulationCase {
  bool replicas;
  Unsynced unsynced;
  bool reshard_after_backward;
  bool scatter_only;  // HSDP: reduce-scatter in every microbatch, all-reduce in the last
};

void expect_accumulation(const AccumulationCase& given, const ProcessGroupPtr& world) {
  constexpr int kMicrobatches = 3, kBlocks = 2;
  std::vector<CollectiveCall> calls;
  const auto mesh = given.replicas ? recording_mesh(world, {2, 2}, {"replicate", "shard"}, calls)
                                   : recording_mesh(world, {world->size()}, {"shard"}, calls);
  Stacks stacks(kBlocks, 5, 7);
  Stack& model = stacks.model;
  shard_stack(model, {.mesh = mesh, .reshard_after_forward = given.reshard_after_backward});
  for (uint64_t step = 0; step < 2; ++step) {
    stacks.plain.zero_grad();
    model.zero_grad();
    calls.clear();
    for (int micro = 0; micro < kMicrobatches; ++micro) {
      const bool last = micro == kMicrobatches - 1;
      if (given.scatter_only) {
        set_requires_all_reduce(model, last);
      } else if (given.unsynced == Unsynced::kAll) {
        set_requires_gradient_sync(model, last);
      } else if (given.unsynced == Unsynced::kRootOnly) {
        set_requires_gradient_sync(model, last, /*recurse=*/false);
      } else {
        for (auto& block : model.blocks) set_requires_gradient_sync(*block, last);
      }
      set_reshard_after_backward(model, given.reshard_after_backward || last);
      const at::Tensor x = fixed({4, 5}, data_seed(step, *world) + 1000 * micro) * 0.3;
      stacks.plain.forward(x).pow(2).sum().backward();
      model.forward(x).pow(2).sum().backward();
    }
    average_gradients(stacks.plain, *world);
    expect_gradients_of(stacks.plain, model, 1e-6);  // sums of averages versus averages of sums

    // All-gathers: the root stays unsharded from forward to backward unless it must be resharded; parameters that are
    // not resharded after backward are reused by the next microbatch.
    const int groups = kBlocks + 1;
    const int gathers = given.reshard_after_backward ? 2 * groups * kMicrobatches : groups;
    EXPECT_EQ(count(calls, "all_gather"), gathers);
    int scatters = groups * kMicrobatches;
    if (!given.scatter_only) {
      const int unsynced_groups = given.unsynced == Unsynced::kAll        ? groups
                                  : given.unsynced == Unsynced::kRootOnly ? 1
                                                                          : kBlocks;
      scatters = unsynced_groups + (groups - unsynced_groups) * kMicrobatches;
    }
    EXPECT_EQ(count(calls, "reduce_scatter"), scatters);
    const int all_reduces = given.scatter_only ? groups : scatters;
    EXPECT_EQ(count(calls, "all_reduce"), given.replicas ? all_reduces : 0);
    descend(stacks.plain);
    descend(model);
    for (const auto& item : stacks.plain.named_parameters()) {  // the next step starts from equal weights
      const at::Tensor mine = model.named_parameters()[item.key()];
      reshard_and_view(mine).local.copy_(part_like(item.value(), mine));
    }
  }
}

TEST(FullyShardTraining, test_gradient_accumulation) {
  for (const bool replicas : {false, true}) {
    for (const auto unsynced : {Unsynced::kAll, Unsynced::kRootOnly, Unsynced::kBlocksOnly}) {
      for (const bool reshard : {true, false}) {
        run_ranks(4, [=](const ProcessGroupPtr& world) {
          expect_accumulation({replicas, unsynced, reshard, false}, world);
        });
      }
    }
  }
  for (const bool reshard : {true, false}) {
    run_ranks(4, [=](const ProcessGroupPtr& world) {
      expect_accumulation({true, Unsynced::kAll, reshard, true}, world);
    });
  }
}

/// Number of all-gathers in a step of three microbatches with three groups.
int gathers_of_step(const ReshardAfterForward& reshard, const ProcessGroupPtr& world) {
  constexpr int kMicrobatches = 3;
  std::vector<CollectiveCall> calls;
  Stacks stacks(2, 5, 7);
  Stack& model = stacks.model;
  shard_stack(model,
              {.mesh = recording_mesh(world, {world->size()}, {"shard"}, calls), .reshard_after_forward = reshard});
  for (int micro = 0; micro < kMicrobatches; ++micro) {
    set_is_last_microbatch(model, micro + 1 == kMicrobatches);
    const at::Tensor x = fixed({4, 5}, data_seed(0, *world) + 1000 * micro);
    stacks.plain.forward(x).pow(2).sum().backward();
    model.forward(x).pow(2).sum().backward();
  }
  average_gradients(stacks.plain, *world);
  expect_gradients_of(stacks.plain, model, 1e-6);  // sums of averages versus averages of sums
  expect_sharded(model);
  return count(calls, "all_gather");
}

TEST(Microbatches, OnlyWhatIsKeptAfterForwardStaysUntilTheLast) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    EXPECT_EQ(gathers_of_step(false, world), 3);
    EXPECT_EQ(gathers_of_step(true, world), 3 * 6);
    EXPECT_EQ(gathers_of_step({}, world), 3 * 5);  // the root stays until backward
  });
}

TEST(FullyShardTraining, test_1f1b_microbatching) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    constexpr int kMicrobatches = 4;
    std::vector<CollectiveCall> calls;
    Stacks stacks(2, 5, 7);
    Stack& model = stacks.model;
    shard_stack(model, {.mesh = recording_mesh(world, {2}, {"shard"}, calls), .reshard_after_forward = false});
    for (uint64_t step = 0; step < 2; ++step) {
      stacks.plain.zero_grad();
      model.zero_grad();
      calls.clear();
      set_is_last_backward(model, false);
      set_reshard_after_backward(model, false);
      for (auto& block : model.blocks) unshard(*block);
      std::vector<at::Tensor> losses;
      for (int micro = 0; micro < kMicrobatches; ++micro) {
        const at::Tensor x = fixed({4, 5}, data_seed(step, *world) + 1000 * micro);
        stacks.plain.forward(x).pow(2).sum().backward();
        losses.push_back(model.forward(x).pow(2).sum());
        if (micro == 0) continue;  // one forward ahead, as in a pipeline
        set_requires_gradient_sync(model, false);
        losses[micro - 1].backward();
      }
      EXPECT_EQ(count(calls, "reduce_scatter"), 0);
      set_is_last_backward(model, true);
      set_requires_gradient_sync(model, true);
      set_reshard_after_backward(model, true);
      losses.back().backward();
      EXPECT_EQ(count(calls, "all_gather"), 3);  // each group once per step
      EXPECT_EQ(count(calls, "reduce_scatter"), 3);
      average_gradients(stacks.plain, *world);
      expect_gradients_of(stacks.plain, model);
      expect_sharded(model);
      descend(stacks.plain);
      descend(model);
    }
  });
}

}  // namespace
}  // namespace megashard::testing
