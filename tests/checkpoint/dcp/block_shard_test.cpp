// Checkpoints of weights that are sharded over several leading dimensions together. Saved shards are boxes of the whole
// tensor, so any other sharding can load them (test_fully_shard_block_shard.py).

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/steps/find_step.h"
#include "parallel/sharded_tensor.h"
#include "parallel/tensor_parallel_layout.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

const Sizes kExpertSizes{{2, 8, 3}, {5}};

/// This rank's shards of weights that depend on the seed, sharded over the first `leading` dimensions.
ShardedTensors experts_of(Formula& unit, const ProcessGroupPtr& world, int64_t leading) {
  FullyShardOptions options{.mesh = flat_mesh(world)};
  options.shard_placement_fn = [leading](const at::Tensor& parameter) {
    return ShardPlacement{.leading_dims = std::min(leading, std::max<int64_t>(parameter.dim() - 1, 1))};
  };
  fully_shard(unit, options);
  return {{"model.w0", reshard_and_view(unit.w[0])}, {"model.w1", reshard_and_view(unit.w[1])}};
}

TEST(FullyShardBlockShard, test_dcp_round_trip) {
  struct Layout {
    int ranks;
    int64_t leading;
  };
  const FormulaImpl expected(kExpertSizes, linear);
  for (const Layout from : {Layout{4, 2}, Layout{2, 1}}) {
    TemporaryFolder folder;
    run_ranks(from.ranks, [&](const ProcessGroupPtr& world) {
      Formula unit(kExpertSizes, linear);
      save_checkpoint(folder.path(), 1, experts_of(unit, world, from.leading), Dict(), world);
    });
    for (const Layout to : {Layout{4, 2}, Layout{8, 2}, Layout{2, 2}, Layout{3, 1}}) {
      run_ranks(to.ranks, [&](const ProcessGroupPtr& world) {
        Formula unit(kExpertSizes, linear, at::kFloat, /*seed=*/50);
        load_checkpoint(*find_step(folder.path(), world), experts_of(unit, world, to.leading), world);
        expect_weights_of(expected, unit);
      });
    }
  }
}

TEST(FullyShardBlockShardExperts, test_checkpoint) {
  TemporaryFolder folder;
  const FormulaImpl expected({{4, 6, 3}}, linear);
  run_ranks(8, [&](const ProcessGroupPtr& world) {  // two experts for each of two ranks, sharded over four
    const auto mesh =
        std::make_shared<DeviceMesh>(world, std::vector<int>{4, 2}, std::vector<std::string>{"fsdp", "ep"});
    const auto ep = mesh->submesh({"ep"});
    Formula unit({{2, 6, 3}}, linear);
    unit.w[0].set_data(expected.w[0].detach().narrow(0, 2 * ep->group(0)->rank(), 2).clone());
    set_tensor_parallel(unit.w[0], ep, Placement::shard(0));
    FullyShardOptions options{.mesh = mesh->submesh({"fsdp"})};
    options.shard_placement_fn = [](const at::Tensor&) { return ShardPlacement{.leading_dims = 2}; };
    fully_shard(unit, options);
    save_checkpoint(folder.path(), 1, {{"model.w0", reshard_and_view(unit.w[0])}}, Dict(), world);
  });
  run_ranks(1, [&](const ProcessGroupPtr& world) {
    Formula unit({{4, 6, 3}}, linear, at::kFloat, /*seed=*/50);
    load_checkpoint(*find_step(folder.path(), world), {{"model.w0", ShardedTensor::replicated(unit.w[0].detach())}},
                    world);
    EXPECT_TRUE(at::equal(unit.w[0], expected.w[0]));
  });
}

}  // namespace
}  // namespace megashard::testing
