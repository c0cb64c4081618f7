// Parameters of one unit on several meshes: fully_shard's shard_placement_fn.

#include "parallel/collectives/fake_process_group.h"
#include "parallel/fsdp/detail/fsdp_state.h"
#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

const Sizes kTwoWeights{{6, 6}, {5, 6}};

at::Tensor two_linears(const Weights& w, at::Tensor x) { return at::linear(at::linear(x, w[0]), w[1]); }

/// The first weight replicated over two pairs, the second sharded over all four ranks.
FullyShardOptions two_meshes(const ProcessGroupPtr& world) {
  const auto pairs =
      std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"replicate", "shard"});
  FullyShardOptions options{.mesh = pairs, .reshard_after_forward = true};
  options.shard_placement_fn = [flat = flat_mesh(world)](const at::Tensor& parameter) {
    return ShardPlacement{.mesh = parameter.size(0) == 5 ? flat : nullptr};
  };
  return options;
}

TEST(ParameterMesh, EachIsShardedOverItsOwn) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Twins twins(kTwoWeights, two_linears, two_meshes(world));
    EXPECT_EQ(fsdp_state(twins.unit)->groups().size(), 2);
    EXPECT_EQ(reshard_and_view(twins.unit.w[0]).local.size(0), 3);
    EXPECT_EQ(reshard_and_view(twins.unit.w[1]).local.size(0), world->rank() == 3 ? 0 : world->rank() == 2 ? 1 : 2);
    for (uint64_t step = 0; step < 3; ++step) {
      const at::Tensor x = fixed({4, 6}, step);
      const at::Tensor expected = twins.plain.forward(x), actual = twins.unit.forward(x);
      EXPECT_TRUE(at::equal(actual, expected));
      twins.zero_grad();
      expected.sum().backward();
      actual.sum().backward();
      twins.expect_equal_gradients();
      twins.expect_sharded();
      descend(twins.plain);
      descend(twins.unit);
    }
  });
}

TEST(ParameterMesh, AllGathersStartBeforeTheFirstIsWaitedFor) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Formula unit(kTwoWeights, two_linears);
    fully_shard(unit, two_meshes(world));
    Events events;
    set_schedule_observer(
        unit, [&](const char* event, const std::string& group) { events.push_back(event + (" " + group)); });
    const at::Tensor loss = unit.forward(fixed({4, 6}, 1).requires_grad_()).sum();
    EXPECT_EQ(events, (Events{"unshard Formula", "unshard Formula#1", "reshard Formula", "reshard Formula#1"}));
    events.clear();
    loss.backward();
    EXPECT_EQ(events, (Events{"pre_backward Formula", "unshard Formula", "unshard Formula#1", "post_backward Formula",
                              "reshard Formula", "reshard Formula#1", "reduce Formula", "reduce Formula#1"}));
  });
}

TEST(ParameterMesh, ControlsReachEveryGroup) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Twins twins(kTwoWeights, two_linears, two_meshes(world));
    for (uint64_t microbatch = 0; microbatch < 2; ++microbatch) {
      const at::Tensor x = fixed({4, 6}, microbatch);
      set_requires_gradient_sync(twins.unit, microbatch == 1);
      twins.plain.forward(x).sum().backward();
      twins.unit.forward(x).sum().backward();
      EXPECT_EQ(pending_gradients(twins.unit).size(), microbatch == 1 ? 0 : 2);
    }
    twins.expect_equal_gradients();
    unshard(twins.unit);
    for (const auto& w : twins.unit.w) EXPECT_EQ(w.size(1), 6);
    EXPECT_EQ(twins.unit.w[1].size(0), 5);
    reshard(twins.unit);
    twins.expect_sharded();
  });
}

TEST(ParameterMesh, AWrongOneIsRefusedBeforeAnythingIsSharded) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto cube =
        std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2, 1}, std::vector<std::string>{"a", "b", "c"});
    Formula unit(kTwoWeights, two_linears);
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.shard_placement_fn = [&](const at::Tensor& parameter) {
      return ShardPlacement{.mesh = parameter.size(0) == 5 ? cube : nullptr};
    };
    contains(message_of([&] { fully_shard(unit, options); }), "fully_shard expects a 1-D or 2-D DeviceMesh, got 3-D");
    EXPECT_FALSE(is_sharded(unit.w[0]));
    options.shard_placement_fn = nullptr;
    fully_shard(unit, options);
    EXPECT_EQ(fsdp_state(unit)->groups().size(), 1);
  });
}

TEST(DataParallelMeshDims, NameDimensionsOfALargerMesh) {
  struct Case {
    DataParallelMeshDims dims;
    int64_t rows;  // of 8, on each rank
    const char* layout;
  };
  const std::vector<Case> cases = {{{.shard = {"dp", "cp"}}, 2, "(shard=4)"},
                                   {{.shard = {"cp"}, .replicate = {"dp"}}, 4, "(replicate=2, shard=2)"},
                                   {{.replicate = {"dp", "cp"}}, 8, "(replicate=4, shard=1)"},
                                   {{.shard = {"cp"}}, 4, "(shard=2)"}};
  for (const auto& given : cases) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      const auto mesh =
          std::make_shared<DeviceMesh>(world, std::vector{2, 2, 1}, std::vector<std::string>{"dp", "cp", "tp"});
      Twins twins({{8, 6}}, linear, {.mesh = mesh, .dp_mesh_dims = given.dims});
      EXPECT_EQ(reshard_and_view(twins.unit.w[0]).local.size(0), given.rows);
      EXPECT_EQ(fsdp_state(twins.unit)->groups()[0]->layout().mesh->describe(), given.layout);
      const at::Tensor x = fixed({4, 6}, 1);
      twins.plain.forward(x).sum().backward();
      twins.unit.forward(x).sum().backward();
      twins.expect_equal_gradients();
    });
  }
}

TEST(DataParallelMeshDims, WrongNamesAreRefused) {
  const ProcessGroupPtr world = make_fake_group({.rank = 0, .world_size = 4});
  const auto mesh = std::make_shared<DeviceMesh>(world, std::vector{2, 2}, std::vector<std::string>{"dp", "tp"});
  const auto refusal = [&](const DataParallelMeshDims& dims) {
    Formula unit({{8, 6}}, linear);
    return message_of([&] { fully_shard(unit, {.mesh = mesh, .dp_mesh_dims = dims}); });
  };
  contains(refusal({}), "dp_mesh_dims names no dimension of the mesh (dp=2, tp=2)");
  contains(refusal({.shard = {"dp"}, .replicate = {"dp"}}), "dp_mesh_dims names dimension 'dp' twice");
  contains(refusal({.shard = {"ep"}}), "has no dimension 'ep'");
}

}  // namespace
}  // namespace megashard::testing
