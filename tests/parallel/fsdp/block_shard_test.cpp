// Leading dimensions of experts' weights sharded as one (ShardPlacement::leading_dims):
// test_fully_shard_block_shard.py. The checkpoint tests are in tests/checkpoint.

#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <torch/optim/adam.h>

#include "parallel/fsdp/detail/shard_geometry.h"
#include "parallel/fsdp/float8_all_gather.h"
#include "parallel/tensor_parallel_layout.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"
#include "tests/support/tensor_parallel_model.h"

namespace megashard::testing {
namespace {

/// Merges the first two dimensions of [experts, out, in]; others are sharded along dimension 0.
ShardPlacement merge_experts(const at::Tensor& parameter) { return {.leading_dims = parameter.dim() == 3 ? 2 : 1}; }

FullyShardOptions by_blocks(const DeviceMeshPtr& mesh) {
  FullyShardOptions options{.mesh = mesh, .reshard_after_forward = true};
  options.shard_placement_fn = merge_experts;
  return options;
}

/// The sum of all experts' outputs, for every token.
at::Tensor experts(const Weights& w, at::Tensor x) {
  const at::Tensor inner = at::matmul(x + w[2], w[0].transpose(1, 2)).relu();
  return at::matmul(inner, w[1].transpose(1, 2)).sum(0);
}
const Sizes kExperts{{2, 8, 3}, {2, 4, 8}, {3}};  // up, down, shift

TEST(FullyShardBlockShard, test_init) {
  for (const int ranks : {1, 2, 4, 8}) {
    run_ranks(ranks, [](const ProcessGroupPtr& world) {
      FormulaImpl plain(kExperts, experts);
      Formula unit(kExperts, experts);
      fully_shard(unit, by_blocks(flat_mesh(world)));
      const int64_t ranks = world->size(), rank = world->rank();
      const ShardedTensor up = reshard_and_view(unit.w[0]);
      EXPECT_EQ(up.global_sizes, kExperts[0]);
      EXPECT_EQ(up.local.sizes().vec(), ranks == 1 ? kExperts[0] : (std::vector<int64_t>{1, 16 / ranks, 3}));
      EXPECT_EQ(up.offsets, (std::vector<int64_t>{rank * 2 / ranks, rank * 16 / ranks % 8, 0}));
      for (size_t i = 0; i < 2; ++i) {  // every rank has rows, and they are consecutive
        const at::Tensor rows = plain.w[i].detach().flatten(0, 1).chunk(ranks)[rank];
        EXPECT_TRUE(at::equal(reshard_and_view(unit.w[i]).local.flatten(0, 1), rows));
        EXPECT_TRUE(at::equal(rows, part_like(plain.w[i], unit.w[i]).flatten(0, 1)));
      }
      EXPECT_EQ(reshard_and_view(unit.w[2]).local.numel(), chunk_range(3, ranks, rank).size);
    });
  }
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Formula many({{6, 5, 3}}, linear);  // whole experts
    fully_shard(many, by_blocks(flat_mesh(world)));
    EXPECT_EQ(many.w[0].sizes(), (std::vector<int64_t>{3, 5, 3}));
    Formula odd({{3, 4, 2}}, linear);
    contains(message_of([&] { fully_shard(odd, by_blocks(flat_mesh(world))); }),
             "parameter 'w0' of sizes [3, 4, 2] cannot be sharded along its first 2 dimensions "
             "over 2 ranks");
    auto options = by_blocks(flat_mesh(world));
    options.shard_placement_fn = [](const at::Tensor&) { return ShardPlacement{.leading_dims = 4}; };
    contains(message_of([&] { fully_shard(odd, options); }),
             "shard_placement_fn cuts 4 leading dimensions of parameter 'w0', which has 3 dimension(s)");
    options.shard_placement_fn = merge_experts;
    options.shard_placement_fn = [](const at::Tensor&) { return ShardPlacement{.dim = 1, .leading_dims = 2}; };
    contains(message_of([&] { fully_shard(odd, options); }), "must give dim 0");
  });
}

/// The same on the meta device.
struct MetaExpertsImpl : FormulaImpl {
  MetaExpertsImpl() : FormulaImpl({}, experts) {
    for (const auto& sizes : kExperts) {
      w.push_back(register_parameter("w" + std::to_string(w.size()), at::empty(sizes, at::kMeta)));
    }
  }
};
using MetaExperts = Hooked<MetaExpertsImpl>;

template <class Unit>
void train_both(FormulaImpl& plain, Unit& unit, ProcessGroup& world, double tolerance) {
  torch::optim::Adam expected(plain.parameters(), 1e-2), optimizer(unit.parameters(), 1e-2);
  for (uint64_t step = 0; step < 5; ++step) {
    const at::Tensor x = fixed({3, 3}, 10 * step + static_cast<uint64_t>(world.rank()));
    expected.zero_grad();
    optimizer.zero_grad();
    plain.forward(x).pow(2).mean().backward();
    unit.forward(x).pow(2).mean().backward();
    average_gradients(plain, world);
    expect_gradients_of(plain, unit, tolerance);
    expect_sharded(unit);
    expected.step();
    optimizer.step();
  }
  expect_weights_of(plain, unit, tolerance * 10);
}

TEST(FullyShardBlockShard, test_train_parity) {
  for (const auto& reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward::to(2)}) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      FormulaImpl plain(kExperts, experts);
      Formula unit(kExperts, experts);
      auto options = by_blocks(flat_mesh(world));
      options.reshard_after_forward = reshard;
      fully_shard(unit, options);
      train_both(plain, unit, *world, 0);
    });
  }
}

TEST(FullyShardBlockShard, test_train_parity_hsdp) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    FormulaImpl plain(kExperts, experts);
    Formula unit(kExperts, experts);
    fully_shard(unit, by_blocks(std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2},
                                                             std::vector<std::string>{"replicate", "shard"})));
    train_both(plain, unit, *world, 1e-5);  // replicas are added in a second step
  });
}

TEST(FullyShardBlockShard, test_meta_init) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    FormulaImpl plain(kExperts, experts);
    MetaExperts unit;
    fully_shard(unit, by_blocks(flat_mesh(world)));
    for (size_t i = 0; i < unit.w.size(); ++i) {
      EXPECT_TRUE(unit.w[i].is_meta());
      materialise_empty_parameter(unit.w[i], device_of_tests());
      reshard_and_view(unit.w[i]).local.fill_(0.5);
      plain.w[i].detach().fill_(0.5);
    }
    train_both(plain, unit, *world, 0);
  });
}

TEST(FullyShardBlockShard, test_no_reorder_copies) {
  const auto geometry = ShardGeometry::of_leading({2, 8, 3}, 2, 4);
  ASSERT_TRUE(geometry.has_value());
  EXPECT_TRUE(geometry->even() && geometry->runs == 1);  // the gathered buffer is the unsharded parameter itself
  const auto joins = [](const ShardGeometry& each) {
    std::vector<RowsCopy> copies;
    add_copy_out(copies, each, {nullptr, at::kFloat, each.chunk_numel}, nullptr);
    return copies.size();
  };
  EXPECT_EQ(joins(*geometry), 1);
  EXPECT_EQ(joins(ShardGeometry({2, 8, 3}, 1, 4)), 4);  // rows of all experts, rank by rank
}

TEST(FullyShardBlockShard, test_state_dict_round_trip) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    FormulaImpl plain(kExperts, experts);
    Formula unit(kExperts, experts);
    fully_shard(unit, by_blocks(flat_mesh(world)));
    for (size_t i = 0; i < unit.w.size(); ++i) {
      const at::Tensor whole = assembled(reshard_and_view(unit.w[i]), *world);
      EXPECT_TRUE(at::equal(whole, plain.w[i])) << i;
      assign_full_parameter(unit.w[i], whole * 2);
      plain.w[i].detach().mul_(2);
    }
    expect_weights_of(plain, unit);
    EXPECT_TRUE(at::equal(unit.forward(fixed({3, 3}, 5)), plain.forward(fixed({3, 3}, 5))));
  });
}

TEST(FullyShardBlockShard, test_full_state_dict_broadcast) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    FormulaImpl first(kExperts, experts);
    MetaExperts unit;
    fully_shard(unit, by_blocks(flat_mesh(world)));
    for (size_t i = 0; i < unit.w.size(); ++i) {
      const at::Tensor whole = world->rank() == 0 ? first.w[i].detach().clone() : at::empty(kExperts[i]);
      world->broadcast(whole, 0).wait();
      assign_full_parameter(unit.w[i], whole);
    }
    expect_weights_of(first, unit);
  });
}

TEST(FullyShardBlockShard, QuantisedRowsOfExperts) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    FormulaImpl plain({{2, 8, 3}}, linear);
    Formula unit({{2, 8, 3}}, linear);
    fully_shard(unit, by_blocks(flat_mesh(world)));
    set_all_gather_extension(unit.w[0], std::make_shared<Float8AllGather>());
    unshard(unit);
    ASSERT_EQ(unit.w[0].sizes(), plain.w[0].sizes());
    // Four bits of mantissa, the leading one included.
    EXPECT_LE((unit.w[0] - plain.w[0]).abs().max().item<float>(), plain.w[0].abs().max().item<float>() / 16);
  });
}

/// Four experts, two per expert-parallel rank, each sharded over four ranks.
const Sizes kAllExperts{{4, 6, 3}, {4, 4, 6}, {3}};
struct ExpertParallel {
  explicit ExpertParallel(const ProcessGroupPtr& world)
      : mesh(std::make_shared<DeviceMesh>(world, std::vector<int>{4, 2}, std::vector<std::string>{"fsdp", "ep"})),
        ep(mesh->submesh({"ep"})),
        whole(kAllExperts, experts),
        mine({{2, 6, 3}, {2, 4, 6}, {3}}, experts) {
    const int64_t first = 2 * ep->group(0)->rank();
    for (size_t i = 0; i < 2; ++i) {
      mine.w[i].set_data(whole.w[i].detach().narrow(0, first, 2).clone());
      set_tensor_parallel(mine.w[i], ep, Placement::shard(0));
    }
    mine.w[2].set_data(whole.w[2].detach().clone());
    set_tensor_parallel(mine.w[2], ep, Placement::replicate());
    auto options = by_blocks(mesh->submesh({"fsdp"}));
    fully_shard(mine, options);
  }
  DeviceMeshPtr mesh, ep;
  FormulaImpl whole;
  Formula mine;
};

TEST(FullyShardBlockShardExperts, test_init) {
  run_ranks(8, [](const ProcessGroupPtr& world) {
    ExpertParallel model(world);
    const ShardedTensor up = reshard_and_view(model.mine.w[0]);
    EXPECT_EQ(up.global_sizes, kAllExperts[0]);
    EXPECT_EQ(up.local.sizes(), (std::vector<int64_t>{1, 3, 3}));
    const int64_t ep = world->rank() % 2, fsdp = world->rank() / 2;
    EXPECT_EQ(up.offsets, (std::vector<int64_t>{2 * ep + fsdp / 2, fsdp % 2 * 3, 0}));
    EXPECT_TRUE(at::equal(assembled(up, *world), model.whole.w[0]));
  });
}

/// The outputs of experts add up, so with a linear loss each expert's gradient is independent of where the others are.
TEST(FullyShardBlockShardExperts, test_train_parity) {
  run_ranks(8, [](const ProcessGroupPtr& world) {
    ExpertParallel model(world);
    auto& fsdp = *model.mesh->submesh({"fsdp"})->group(0);
    for (uint64_t step = 0; step < 3; ++step) {
      const at::Tensor x = fixed({3, 3}, 10 * step + static_cast<uint64_t>(fsdp.rank()));
      model.whole.zero_grad();
      model.mine.zero_grad();
      model.whole.forward(x).sum().backward();
      model.mine.forward(x).sum().backward();
      average_gradients(model.whole, fsdp);
      for (size_t i = 0; i < 2; ++i) {
        const at::Tensor expected = part_like(model.whole.w[i].grad(), model.mine.w[i]);
        // A batched product of two experts may add in another order than one of four.
        EXPECT_TRUE(at::allclose(model.mine.w[i].grad(), expected, 1e-5, 1e-6)) << i;
      }
      const c10::NoGradGuard no_grad;
      for (size_t i = 0; i < 2; ++i) {
        model.whole.w[i].sub_(model.whole.w[i].grad(), 0.01);
        model.mine.w[i].sub_(model.mine.w[i].grad(), 0.01);
      }
    }
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::allclose(assembled(reshard_and_view(model.mine.w[i]), *world), model.whole.w[i], 1e-5, 1e-6));
    }
  });
}

}  // namespace
}  // namespace megashard::testing
