// Parameters sharded along a dimension other than the first (shard_placement_fn): test_fully_shard_init.py,
// _training.py and _state_dict.py.

#include <ATen/ops/zeros.h>
#include <torch/optim/adam.h>

#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

ShardPlacement largest_dim(const at::Tensor& parameter) {
  const auto sizes = parameter.sizes();
  return {.dim = std::max_element(sizes.begin(), sizes.end()) - sizes.begin()};
}

FullyShardOptions on_largest_dim(const DeviceMeshPtr& mesh) {
  FullyShardOptions options{.mesh = mesh, .reshard_after_forward = true};
  options.shard_placement_fn = largest_dim;
  return options;
}

/// A block whose matrices are largest in different dimensions: [2h, h], [h, 2h] and [h].
at::Tensor two_matrices(const Weights& w, at::Tensor x) {
  return x + at::linear(at::linear(x, w[0]).relu(), w[1], w[2]);
}
const Sizes kBlock{{16, 8}, {8, 16}, {8}};

struct Blocks {
  Blocks() : root(Sizes{{4, 8}}, linear) {
    for (const char* name : {"a", "b"}) {
      units.push_back(std::make_shared<Formula>(kBlock, two_matrices, at::kFloat, units.empty() ? 10 : 20));
      root.register_module(name, units.back());
    }
    root.body = [this](const Weights& w, at::Tensor x) {
      for (auto& unit : units) x = unit->forward(x);
      return at::linear(x, w[0]);
    };
  }
  void shard(const FullyShardOptions& options) {
    for (auto& unit : units) fully_shard(*unit, options);
    fully_shard(root, options);
  }
  Formula root;
  std::vector<std::shared_ptr<Formula>> units;
};

TEST(FullyShardInit, test_init_1d_transformer_shard_largest_dim) {
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [](const ProcessGroupPtr& world) {
      Blocks plain, blocks;
      blocks.shard(on_largest_dim(flat_mesh(world)));
      const auto whole = plain.root.named_parameters();
      for (const auto& item : blocks.root.named_parameters()) {
        const int64_t dim = largest_dim(whole[item.key()]).dim;
        const ShardedTensor view = reshard_and_view(item.value());
        EXPECT_EQ(view.placements, (std::vector<Placement>{Placement::shard(dim)})) << item.key();
        EXPECT_EQ(view.local.size(dim) * world->size(), whole[item.key()].size(dim));
        EXPECT_TRUE(at::equal(view.local, part_like(whole[item.key()], item.value())));
      }
      for (size_t i = 0; i < 2; ++i) {  // the gathered parameter equals the original
        set_is_last_backward(blocks.root, true);
        unshard(*blocks.units[i]);
        for (size_t k = 0; k < kBlock.size(); ++k)
          EXPECT_TRUE(at::equal(blocks.units[i]->w[k], plain.units[i]->w[k])) << k;
      }
    });
  }
}

TEST(FullyShardInit, test_init_1d_transformer_shard_dim_neg1) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.shard_placement_fn = [](const at::Tensor&) { return ShardPlacement{.dim = -1}; };
    FormulaImpl plain(kBlock, two_matrices);
    Formula unit(kBlock, two_matrices);
    fully_shard(unit, options);
    for (size_t i = 0; i < kBlock.size(); ++i) {
      const auto view = reshard_and_view(unit.w[i]);
      const int64_t last = static_cast<int64_t>(kBlock[i].size()) - 1;
      EXPECT_EQ(view.placements, (std::vector<Placement>{Placement::shard(last)}));
      EXPECT_TRUE(at::equal(view.local, plain.w[i].detach().chunk(2, -1)[world->rank()]));
    }
  });
}

TEST(FullyShardInit, test_init_1d_uneven_shard_largest_dim) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Formula unit({{3, 6}}, linear);
    contains(message_of([&] { fully_shard(unit, on_largest_dim(flat_mesh(world))); }),
             "parameter 'w0' of sizes [3, 6] cannot be sharded on dimension 1 over 4 ranks");
    Formula even({{3, 8}}, linear);
    fully_shard(even, on_largest_dim(flat_mesh(world)));
  });
}

TEST(FullyShardInit, test_invalid_shard_dim) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const int64_t dim : {1, -2}) {
      FullyShardOptions options{.mesh = flat_mesh(world)};
      options.shard_placement_fn = [=](const at::Tensor&) { return ShardPlacement{.dim = dim}; };
      Formula unit({{6}}, linear);
      contains(message_of([&] { fully_shard(unit, options); }),
               "shard dimension " + std::to_string(dim) + " of parameter 'w0' is invalid");
    }
  });
}

TEST(FullyShardTraining, test_train_parity_single_group_shard_largest_dim) {
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [](const ProcessGroupPtr& world) {
      const auto layers = [](const Weights& w, at::Tensor x) {
        return at::linear(at::linear(x, w[0], w[1]).relu(), w[2]);
      };
      const Sizes sizes{{12, 4}, {12}, {4, 12}};
      FormulaImpl plain(sizes, layers);
      Formula unit(sizes, layers);
      fully_shard(unit, on_largest_dim(flat_mesh(world)));
      torch::optim::Adam expected(plain.parameters(), 1e-2), optimizer(unit.parameters(), 1e-2);
      for (uint64_t step = 0; step < 10; ++step) {
        const at::Tensor x = fixed({3, 4}, 10 * step + static_cast<uint64_t>(world->rank()));
        expected.zero_grad();
        optimizer.zero_grad();
        const at::Tensor loss = plain.forward(x).sum(), sharded_loss = unit.forward(x).sum();
        ASSERT_TRUE(at::equal(sharded_loss, loss)) << "step " << step;
        loss.backward();
        sharded_loss.backward();
        average_gradients(plain, *world);
        expect_gradients_of(plain, unit);
        expected.step();
        optimizer.step();
      }
      expect_weights_of(plain, unit);
    });
  }
}

TEST(FullyShardTraining, test_train_parity_shard_placement_fn_shard_largest_dim) {
  for (const bool replicas : {false, true}) {
    for (const auto& reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward::to(2)}) {
      if (replicas && reshard.kind == ReshardAfterForward::Kind::kTo) continue;
      run_ranks(4, [&](const ProcessGroupPtr& world) {
        Blocks plain, blocks;
        auto options =
            on_largest_dim(replicas ? std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2},
                                                                   std::vector<std::string>{"replicate", "shard"})
                                    : flat_mesh(world));
        options.reshard_after_forward = reshard;
        blocks.shard(options);
        for (uint64_t step = 0; step < 5; ++step) {
          const at::Tensor x = fixed({3, 8}, 10 * step + static_cast<uint64_t>(world->rank())) * 0.1;
          plain.root.zero_grad();
          blocks.root.zero_grad();
          const at::Tensor expected = plain.root.forward(x).pow(2).mean();
          const at::Tensor loss = blocks.root.forward(x).pow(2).mean();
          ASSERT_TRUE(expected.isfinite().item<bool>());
          expected.backward();
          loss.backward();
          average_gradients(plain.root, *world);
          // Replicas are averaged in a second step: different order of additions.
          expect_gradients_of(plain.root, blocks.root, replicas ? 1e-5 : 0);
          expect_sharded(blocks.root);
          descend(plain.root, 1e-7);
          descend(blocks.root, 1e-7);
        }
        expect_weights_of(plain.root, blocks.root, replicas ? 1e-6 : 0);
      });
    }
  }
}

TEST(FullyShardTraining, test_shard_placement_fn_contiguous_params_grads) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = true};
    options.shard_placement_fn = [](const at::Tensor& parameter) {
      return ShardPlacement{.dim = parameter.dim() > 1 ? 1 : 0};
    };
    bool contiguous_full = true;
    Formula unit(kBlock, [&](const Weights& w, at::Tensor x) {
      for (const auto& each : w) contiguous_full = contiguous_full && each.is_contiguous();
      return two_matrices(w, x);
    });
    fully_shard(unit, options);
    for (int step = 0; step < 2; ++step) {
      unit.forward(fixed({3, 8}, 1).requires_grad_()).sum().backward();
      EXPECT_TRUE(contiguous_full);
      for (const auto& w : unit.w) {
        EXPECT_TRUE(w.is_contiguous());
        EXPECT_TRUE(reshard_and_view(w).local.is_contiguous());
        EXPECT_TRUE(w.grad().is_contiguous());
      }
    }
  });
}

TEST(FullyShardStateDict, RowsOfTheLargestDimension) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Blocks plain, blocks;
    blocks.shard(on_largest_dim(flat_mesh(world)));
    const auto expected = plain.root.named_parameters();
    for (const auto& item : blocks.root.named_parameters()) {
      const ShardedTensor view = reshard_and_view(item.value());
      EXPECT_TRUE(view.local.is_alias_of(item.value()));
      const int64_t dim = largest_dim(expected[item.key()]).dim;
      at::Tensor whole = at::zeros(view.global_sizes);
      whole.narrow(dim, view.offsets[static_cast<size_t>(dim)], view.local.size(dim)).copy_(view.local);
      world->all_reduce(whole, ReduceOp::kSum).wait();
      EXPECT_TRUE(at::equal(whole, expected[item.key()])) << item.key();
      assign_full_parameter(item.value(), whole * 2);
      EXPECT_TRUE(at::equal(reshard_and_view(item.value()).local, part_like(expected[item.key()] * 2, item.value())));
    }
  });
}

}  // namespace
}  // namespace megashard::testing
