// Random models trained sharded and unsharded: the same losses, gradients and weights, bit for bit;
// sharded on the simulated device where that is asked for, unsharded on the CPU. Ranks' parts of
// buffers are aligned.
// Every case depends on its seed alone; MEGASHARD_TREE_SEED runs one, MEGASHARD_TREE_CASES that
// many.

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "tests/differential/sharded_run.h"
#include "tests/differential/unsharded_run.h"
#include "tests/support/default_device.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

constexpr int kCases = 600;
int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

struct Case {
  TreeSpec tree;
  ExpectedRun expected;
};

/// Every rank's part of a buffer begins where NCCL copies 16 bytes at a time; of gradients, on a line of its LL128
/// protocol.
void check_parts(const std::vector<CollectiveCall>& calls, int shards) {
  for (const auto& call : calls) {
    const bool scatters = call.operation == "reduce_scatter";
    if (!scatters && call.operation != "all_gather") continue;
    const int64_t bytes = call.numel * static_cast<int64_t>(c10::elementSize(call.dtype));
    const int64_t part = scatters ? bytes / shards : bytes;
    TORCH_CHECK(part % (scatters ? 128 : 16) == 0, "the second rank's part of a ", call.operation, " of ", call.numel,
                " ", call.dtype, " elements begins at byte ", part);
  }
}

/// All cases of one world in one set of ranks: connecting costs more than a case.
void run_cases(int world, const std::vector<Case>& cases) {
  run_ranks(
      world,
      [&](const ProcessGroupPtr& group) {
        std::vector<CollectiveCall> calls;
        std::map<int, DeviceMeshPtr> meshes;
        for (const auto& [tree, expected] : cases) {
          DeviceMeshPtr& mesh = meshes[tree.replicas];
          const int shards = world / tree.replicas;
          if (mesh == nullptr && tree.replicas == 1) mesh = recording_mesh(group, {world}, {"shard"}, calls);
          if (mesh == nullptr) mesh = recording_mesh(group, {tree.replicas, shards}, {"replicate", "shard"}, calls);
          calls.clear();
          try {
            run_sharded(tree, expected, mesh, group->rank());
            check_parts(calls, shards);
          } catch (const c10::Error& error) {
            TORCH_CHECK(false, "tree of seed ", tree.seed, " (MEGASHARD_TREE_SEED=", tree.seed,
                        "): ", error.what_without_backtrace(), "\n", to_json(tree).dump());
          }
        }
      },
      std::chrono::seconds(120));
}

TEST(RandomTrees, ShardedTrainingEqualsUnsharded) {
  const int only = from_environment("MEGASHARD_TREE_SEED", -1);
  const int count = from_environment("MEGASHARD_TREE_CASES", kCases);
  if (on_simulated_device()) set_default_device_of_tests(at::kCPU);  // of models before sharding
  const int first = only >= 0 ? only : from_environment("MEGASHARD_TREE_FIRST", 0);
  std::map<int, std::vector<Case>> by_world;
  for (int seed = first; seed < (only >= 0 ? only + 1 : first + count); ++seed) {
    TreeSpec tree = random_tree(static_cast<uint64_t>(seed));
    ExpectedRun expected = run_unsharded(tree);
    const int world = tree.world;
    by_world[world].push_back({std::move(tree), std::move(expected)});
  }
  for (const auto& [world, cases] : by_world) run_cases(world, cases);
}

}  // namespace
}  // namespace megashard::testing
