// FSDP over tensor-parallel layers: placement of the pieces. Names are those of PyTorch's tests.

#include "framework/modules/deferred_init.h"
#include "parallel/tensor_parallel_layout.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"
#include "tests/support/tensor_parallel_model.h"

namespace megashard::testing {
namespace {

using Offsets = std::vector<int64_t>;
using Placements = std::vector<Placement>;

DeviceMeshPtr mesh_2d(const ProcessGroupPtr& world) {
  return std::make_shared<DeviceMesh>(world, std::vector<int>{world->size() / 2, 2},
                                      std::vector<std::string>{"dp", "tp"});
}

std::string error_of_sharding(const DeviceMeshPtr& tp, const DeviceMeshPtr& fsdp) {
  Formula unit({{4, 6}}, linear);
  set_tensor_parallel(unit.w[0], tp, Placement::shard(0));
  return message_of([&] { fully_shard(unit, {.mesh = fsdp}); });
}

TEST(FullyShardInit, test_shard_dtensor_parameters) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto mesh = mesh_2d(world);
    const int dp = mesh->coordinate(0), tp = mesh->coordinate(1);
    ParallelMlp mlp(6, 10, mesh->submesh({"tp"}));
    fully_shard(mlp, {.mesh = mesh->submesh({"dp"})});
    fill_whole(mlp, 30);

    // 5 rows per tensor-parallel rank, 3 of them on the first FSDP rank.
    const auto up = reshard_and_view(mlp.up->weight);
    EXPECT_EQ(up.global_sizes, (std::vector<int64_t>{10, 6}));
    EXPECT_EQ(up.offsets, (Offsets{5 * tp + 3 * dp, 0}));
    EXPECT_EQ(up.local.sizes(), at::IntArrayRef({dp == 0 ? 3 : 2, 6}));
    EXPECT_EQ(up.placements, (Placements{Placement::strided_shard(0, 2), Placement::shard(0)}));
    EXPECT_EQ(up.mesh->describe(), "(dp=2, tp=2)");
    EXPECT_EQ(up.mesh->group("tp"), mesh->group("tp"));
    EXPECT_EQ(reshard_and_view(mlp.up->bias).offsets, (Offsets{5 * tp + 3 * dp}));

    const auto down = reshard_and_view(mlp.down->weight);
    EXPECT_EQ(down.global_sizes, (std::vector<int64_t>{6, 10}));
    EXPECT_EQ(down.offsets, (Offsets{3 * dp, 5 * tp}));
    EXPECT_EQ(down.placements, (Placements{Placement::shard(0), Placement::shard(1)}));

    const auto bias = reshard_and_view(mlp.down->bias);
    EXPECT_EQ(bias.global_sizes, (std::vector<int64_t>{6}));
    EXPECT_EQ(bias.offsets, (Offsets{3 * dp}));
    EXPECT_EQ(bias.placements, (Placements{Placement::shard(0), Placement::replicate()}));
    EXPECT_EQ(reshard_and_view(mlp.norm->weight).placements, (Placements{Placement::shard(0)}));

    uint64_t seed = 30;
    for (const auto& item : mlp.named_parameters()) {
      const at::Tensor whole = fixed(global_sizes(item.value()), seed++) * 0.5;
      EXPECT_TRUE(at::equal(assembled(reshard_and_view(item.value()), *world), whole)) << item.key();
    }
  });
}

TEST(FullyShardInit, test_meta_device_2d_init) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto mesh = mesh_2d(world);
    // Uneven over FSDP's ranks: 10, and 2, which leaves the second FSDP rank without rows.
    for (const int64_t hidden : {10, 2}) {
      const auto build = [&](const DeviceMeshPtr& tp, InitTape& tape) {
        auto model = tape.construct([&] { return std::make_shared<ParallelMlp>(6, hidden, tp); });
        tape.capture(*model);
        return model;
      };
      InitTape plain_tape(at::detail::createCPUGenerator(5));
      const auto plain = build(mesh_of_one(), plain_tape);
      plain_tape.materialise(
          *plain, [](const std::string&, at::Tensor& target, const at::Tensor& full) { become(target, full); });
      plain->to(device_of_tests());
      InitTape tape(at::detail::createCPUGenerator(5));
      const auto model = build(mesh->submesh({"tp"}), tape);
      fully_shard(*model, {.mesh = mesh->submesh({"dp"}), .reshard_after_forward = true});
      EXPECT_TRUE(model->up->weight.is_meta());
      contains(message_of([&] { model->forward(fixed({2, 6}, 1)); }), "still on the meta device");
      tape.materialise(*model, [](const std::string&, at::Tensor& target, const at::Tensor& full) {
        assign_full_parameter(target, full);  // the tensor-parallel piece
      });
      const auto expected = plain->named_parameters();
      for (const auto& item : model->named_parameters()) {
        const auto view = reshard_and_view(item.value());
        EXPECT_TRUE(at::equal(view.local, part_like(expected[item.key()], item.value()))) << item.key();
      }
      const at::Tensor x = fixed({2, 6}, 1 + mesh->coordinate(0));
      expect_near(model->forward(x).detach(), plain->forward(x).detach(), "output");

      // PyTorch's other way: memory first, then each layer's own initial values.
      InitTape unused(at::detail::createCPUGenerator(5));
      const auto empty = build(mesh->submesh({"tp"}), unused);
      fully_shard(*empty, {.mesh = mesh->submesh({"dp"})});
      for (auto& parameter : empty->parameters()) {
        materialise_empty_parameter(parameter, device_of_tests());
        reshard_and_view(parameter).local.fill_(9);
      }
      empty->up->reset_parameters();
      empty->down->reset_parameters();
      for (const auto& parameter : {empty->up->weight, empty->up->bias, empty->down->weight, empty->down->bias})
        EXPECT_FALSE((reshard_and_view(parameter).local.abs() > 1).any().item<bool>());
    }
  });
}

TEST(FullyShardInit, test_move_states_to_device_dtensor_valid) {
  // Meta stands for the device: parameters are created on the CPU and move to the mesh's. (LibTorch does not move
  // buffers to meta.)
  const auto world = make_fake_group({.rank = 1, .world_size = 4, .device_type = at::kMeta});
  const auto mesh = mesh_2d(world);
  ParallelMlp mlp(6, 10, mesh->submesh({"tp"}));
  fully_shard(mlp, {.mesh = mesh->submesh({"dp"})});
  for (const auto& item : mlp.named_parameters())
    EXPECT_EQ(item.value().device(), c10::Device(at::kMeta)) << item.key();
  EXPECT_EQ(reshard_and_view(mlp.up->weight).global_sizes, (std::vector<int64_t>{10, 6}));
}

TEST(FullyShardInit, test_move_states_to_device_dtensor_invalid) {
  const auto tp = std::make_shared<DeviceMesh>(make_fake_group({.rank = 0, .world_size = 2, .device_type = at::kMeta}),
                                               std::vector<int>{2});
  const auto dp = std::make_shared<DeviceMesh>(make_fake_group({.rank = 0, .world_size = 2}), std::vector<int>{2});
  const auto error = error_of_sharding(tp, dp);
  contains(error, "parameter 'w0' is tensor-parallel over a mesh of meta devices, and fully_shard");
  contains(error, "shards over one of cpu devices");
}

TEST(FullyShardInit, test_init_2d_transformer_shard_diff_dim) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto mesh = mesh_2d(world);
    ParallelStack<ParallelBlock> model(8, 12, mesh->submesh({"tp"}));
    fill_whole(model);
    // FSDP shards the dimension that tensor parallelism does not shard.
    const auto other_dim = [](const at::Tensor& parameter) {
      const auto layouts = tensor_parallel_layouts(parameter);
      if (layouts.empty() || parameter.dim() == 1) return ShardPlacement{};
      return ShardPlacement{.dim = layouts[0].placement == Placement::shard(0) ? 1 : 0};
    };
    shard_units(model, {.mesh = mesh->submesh({"dp"}), .shard_placement_fn = other_dim});
    uint64_t seed = 1;
    for (const auto& item : model.named_parameters()) {
      const auto view = reshard_and_view(item.value());
      const at::Tensor whole = fixed(view.global_sizes, seed++) * 0.5;
      EXPECT_TRUE(at::equal(assembled(view, *world), whole)) << item.key();
    }
    const auto up = reshard_and_view(model.units[1]->mlp->up->weight);
    EXPECT_EQ(up.placements, (Placements{Placement::shard(1), Placement::shard(0)}));
    EXPECT_EQ(up.offsets, (Offsets{6 * mesh->coordinate(1), 4 * mesh->coordinate(0)}));
    const auto down = reshard_and_view(model.units[1]->mlp->down->weight);
    EXPECT_EQ(down.placements, (Placements{Placement::shard(0), Placement::shard(1)}));
  });
}

TEST(FullyShardDtensor, test_sharded_param_correctness_1d) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    // A tensor-parallel dimension of one rank does not shard: the shards are torch.chunk's.
    const auto mesh = std::make_shared<DeviceMesh>(world, std::vector<int>{2, 1}, std::vector<std::string>{"dp", "tp"});
    ParallelMlp mlp(6, 7, mesh->submesh({"tp"}));
    fill_whole(mlp, 3);
    fully_shard(mlp, {.mesh = mesh->submesh({"dp"})});
    uint64_t seed = 3;
    for (const auto& item : mlp.named_parameters()) {
      const auto view = reshard_and_view(item.value());
      const at::Tensor whole = fixed(view.global_sizes, seed++) * 0.5;
      EXPECT_TRUE(at::equal(view.local, whole.chunk(2)[static_cast<size_t>(world->rank())]));
      EXPECT_EQ(view.placements[0], Placement::shard(0)) << item.key();
    }
  });
}

TEST(FullyShardDtensor, test_fsdp_tp_dtensor_sharded_params) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto mesh = std::make_shared<DeviceMesh>(world, std::vector<int>{4}, std::vector<std::string>{"tp"});
    // Pure tensor parallelism first: views and whole weights without fully_shard.
    ParallelMlp mlp(8, 12, mesh);
    fill_whole(mlp, 3);
    EXPECT_EQ(reshard_and_view(mlp.up->weight).offsets, (Offsets{3 * world->rank(), 0}));
    EXPECT_TRUE(at::equal(assembled(reshard_and_view(mlp.down->weight), *world), fixed({8, 12}, 7) * 0.5));
    // Then FSDP over the other dimension: 3 rows of the first weight over 2 ranks, then over 4, where the last has no
    // rows and its offset is the end of the whole weight.
    const auto wide = make_fake_group({.rank = 3, .world_size = 8});
    const auto grid = std::make_shared<DeviceMesh>(wide, std::vector<int>{4, 2}, std::vector<std::string>{"dp", "tp"});
    ParallelMlp wider(8, 6, grid->submesh({"tp"}));
    fully_shard(wider, {.mesh = grid->submesh({"dp"})});  // dp 1, tp 1
    EXPECT_EQ(reshard_and_view(wider.up->weight).offsets, (Offsets{4, 0}));
    const auto last = std::make_shared<DeviceMesh>(make_fake_group({.rank = 6, .world_size = 8}),
                                                   std::vector<int>{4, 2}, std::vector<std::string>{"dp", "tp"});
    ParallelMlp empty(8, 6, last->submesh({"tp"}));
    fully_shard(empty, {.mesh = last->submesh({"dp"})});  // dp 3, tp 0: not the start of tp 1
    EXPECT_EQ(reshard_and_view(empty.up->weight).offsets, (Offsets{6, 0}));
    EXPECT_EQ(reshard_and_view(empty.up->weight).local.size(0), 0);
  });
}

TEST(FullyShardDtensor, test_validation_mesh_mismatch) {
  const auto world = make_fake_group({.rank = 0, .world_size = 4});
  const auto all = std::make_shared<DeviceMesh>(world, std::vector<int>{4});
  const auto error = error_of_sharding(mesh_2d(world)->submesh({"tp"}), all);
  contains(error, "'w0' is tensor-parallel over 2 ranks, 2 of which are in one group of the mesh (4)");
  contains(error, "must be different dimensions of one mesh");
}

TEST(FullyShardDtensor, test_validation_non_replicate_dp_placement) {
  const auto mesh = mesh_2d(make_fake_group({.rank = 0, .world_size = 4}));
  contains(error_of_sharding(mesh->submesh({"dp"}), mesh->submesh({"dp"})), "must be different dimensions of one mesh");
}

TEST(FullyShardDtensor, test_validation_invalid_dim_names) {
  const auto mesh = mesh_2d(make_fake_group({.rank = 0, .world_size = 4}));
  contains(message_of([&] { mesh->submesh({"dp", "cp"}); }), "(dp=2, tp=2) has no dimension 'cp'");
  contains(message_of([&] { mesh->submesh({"dp", "dp"}); }), "two dimensions are named 'dp'");
}

TEST(FullyShardDtensor, test_validation_at_least_one_required) {
  const auto mesh = mesh_2d(make_fake_group({.rank = 0, .world_size = 4}));
  contains(message_of([&] { mesh->submesh({}); }), "needs the name of at least one dimension");
}

}  // namespace
}  // namespace megashard::testing
