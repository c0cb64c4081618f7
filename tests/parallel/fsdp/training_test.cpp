// test_fully_shard_training.py: sharded training equals unsharded training as by DistributedDataParallel. Gradients and
// weights are compared bit for bit, because groups on the CPU add in rank order.

#include <torch/optim/adam.h>

#include <chrono>
#include <thread>

#include "tests/support/model_pairs.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

const std::vector<ReshardAfterForward>& all_reshards() {
  static const std::vector<ReshardAfterForward> all{{}, true, false, ReshardAfterForward::to(2)};
  return all;
}

TEST(FullyShardTraining, test_root_no_forward_inputs) {
  struct NoInputsImpl : torch::nn::Module {
    NoInputsImpl() : w(register_parameter("w", fixed({5, 3}, 1))) {}
    at::Tensor forward() { return w.pow(2).sum(); }
    at::Tensor w;
  };
  run_ranks(2, [](const ProcessGroupPtr& world) {
    NoInputsImpl plain;
    Hooked<NoInputsImpl> model;
    fully_shard(model, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    for (int step = 0; step < 3; ++step) {
      for (torch::nn::Module* each : std::initializer_list<torch::nn::Module*>{&plain, &model}) each->zero_grad();
      plain.forward().backward();
      model.forward().backward();
      expect_gradients_of(plain, model);
      expect_sharded(model);
      descend(plain);
      descend(model);
    }
  });
}

TEST(FullyShardTraining, test_param_registration_after_forward) {
  for (const auto& reshard : all_reshards()) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      using Kind = ReshardAfterForward::Kind;
      Chain chain(2);
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      const auto rows = [&](int i) { return chain.units[i]->w[0].size(0); };
      const int64_t local = world->rank() < 3 ? 2 : 0;
      chain.forward();
      EXPECT_EQ(rows(0), reshard.kind == Kind::kNever ? 6 : local);
      EXPECT_EQ(rows(1), reshard.kind == Kind::kNever ? 6 : local);
      const bool root_kept = reshard.kind == Kind::kNever || reshard.kind == Kind::kDefault;
      EXPECT_EQ(chain.root.w[0].size(0), root_kept ? 6 : local);
      for (auto& unit : chain.units) megashard::reshard(*unit);
      megashard::reshard(chain.root);
      expect_sharded(chain.root);
      EXPECT_EQ(chain.root.w[0].size(0), local);
    });
  }
}

TEST(FullyShardTraining, test_param_registration_after_backward) {
  for (const auto& reshard : all_reshards()) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      Chain chain(2);
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      for (int step = 0; step < 2; ++step) {
        chain.forward().backward();
        for (const auto& w : chain.root.parameters()) EXPECT_EQ(w.size(0), world->rank() < 3 ? 2 : 0);
      }
    });
  }
}

/// Ten steps of Adam, plain with averaged gradients and sharded.
void expect_adam_parity(FormulaImpl& plain, Formula& unit, int64_t width, ProcessGroup& world) {
  torch::optim::Adam expected(plain.parameters(), 1e-2), optimizer(unit.parameters(), 1e-2);
  for (uint64_t step = 0; step < 10; ++step) {
    const at::Tensor x = fixed({3, width}, data_seed(step, world));
    expected.zero_grad();
    optimizer.zero_grad();
    const at::Tensor loss = plain.forward(x).sum(), sharded_loss = unit.forward(x).sum();
    ASSERT_TRUE(at::equal(sharded_loss, loss)) << "step " << step;
    loss.backward();
    sharded_loss.backward();
    average_gradients(plain, world);
    expect_gradients_of(plain, unit);
    expected.step();
    optimizer.step();
  }
  expect_weights_of(plain, unit);
}

at::Tensor two_layers(const Weights& w, at::Tensor x) {
  return at::linear(at::linear(x, w[0], w[1]).relu(), w[2], w[3]);
}

TEST(FullyShardTraining, test_train_parity_single_group_shard_dim0) {
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t hidden : {1, 7, 12}) {  // one row, a prime number, an even one
      run_ranks(ranks, [=](const ProcessGroupPtr& world) {
        const Sizes sizes{{hidden, 3}, {hidden}, {3, hidden}, {3}};
        FormulaImpl plain(sizes, two_layers);
        Formula unit(sizes, two_layers);
        fully_shard(unit, {.mesh = flat_mesh(world)});
        expect_adam_parity(plain, unit, 3, *world);
      });
    }
  }
}

/// Makes a different rank late in each step, in forward and in backward.
void delay(ProcessGroup& world, uint64_t step) {
  if (static_cast<int>(step) % world.size() == world.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

TEST(FullyShardTraining, test_train_parity_multi_group) {
  for (const auto& reshard : all_reshards()) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      Stacks stacks(3, 5, 7);
      shard_stack(stacks.model, {.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      for (uint64_t step = 0; step < 4; ++step) {
        const at::Tensor x = fixed({4, 5}, data_seed(step, *world));
        stacks.plain.zero_grad();
        stacks.model.zero_grad();
        delay(*world, step);
        const at::Tensor expected = stacks.plain.forward(x).pow(2).sum();
        const at::Tensor loss = stacks.model.forward(x).pow(2).sum();
        ASSERT_TRUE(at::equal(loss, expected)) << "step " << step;
        expected.backward();
        average_gradients(stacks.plain, *world);
        loss.register_hook([&](const at::Tensor&) { delay(*world, step + 1); });
        loss.backward();
        expect_gradients_of(stacks.plain, stacks.model);
        descend(stacks.plain);
        descend(stacks.model);
      }
    });
  }
}

TEST(FullyShardTraining, test_non_root_forward_backward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world)});
    const at::Tensor x = fixed({4, 6}, data_seed(0, *world));
    plain.root.forward(x).sum().backward();
    chain.root.forward(x).sum().backward();
    // One unit by itself: its backward reduces and reshards as the root's does.
    plain.units[0]->forward(x).sum().backward();
    chain.events.clear();
    chain.units[0]->forward(x).sum().backward();
    EXPECT_EQ(chain.events, (Events{"unshard a", "reshard a", "pre_backward a", "unshard a", "post_backward a",
                                    "reshard a", "reduce a"}));
    expect_sharded(chain.root);
    // Gradients are averaged twice on the shard, but once, after adding, on the plain model.
    average_gradients(plain.root, *world);
    expect_gradients_of(plain.root, chain.root, 1e-6);
  });
}

TEST(FullyShardTraining, test_multi_forward_module) {
  for (const bool reshard : {true, false}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      Chain plain(2), chain(2);
      for (Chain* each : {&plain, &chain}) {
        each->root.body = [each](const Weights& w, at::Tensor x) {
          const at::Tensor inner = each->units[0]->forward(x);
          return at::linear(each->units[1]->forward(each->units[0]->forward(inner) + inner), w[0]);
        };
      }
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      for (uint64_t step = 0; step < 2; ++step) {
        const at::Tensor x = fixed({4, 6}, data_seed(step, *world)) * 0.1;
        plain.root.zero_grad();
        chain.root.zero_grad();
        plain.root.forward(x).sum().backward();
        chain.root.forward(x).sum().backward();
        average_gradients(plain.root, *world);
        expect_gradients_of(plain.root, chain.root, 1e-6);  // one reduction per use
        expect_sharded(chain.root);
      }
    });
  }
}

TEST(FullyShardTraining, test_explicit_prefetching) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Stacks stacks(5, 5, 7);
    auto& blocks = stacks.model.blocks;
    shard_stack(stacks.model, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    for (size_t i = 0; i < blocks.size(); ++i) {
      std::vector<torch::nn::Module*> next, previous;
      for (size_t ahead : {1, 2}) {
        if (i + ahead < blocks.size()) next.push_back(blocks[i + ahead].get());
        if (i >= ahead) previous.push_back(blocks[i - ahead].get());
      }
      set_modules_to_forward_prefetch(*blocks[i], next);
      set_modules_to_backward_prefetch(*blocks[i], previous);
    }
    for (uint64_t step = 0; step < 3; ++step) {
      const at::Tensor x = fixed({4, 5}, data_seed(step, *world));
      stacks.plain.zero_grad();
      stacks.model.zero_grad();
      stacks.plain.forward(x).pow(2).sum().backward();
      average_gradients(stacks.plain, *world);
      stacks.model.forward(x).pow(2).sum().backward();
      expect_gradients_of(stacks.plain, stacks.model);
      descend(stacks.plain);
      descend(stacks.model);
    }
  });
}

TEST(FullyShardTraining, test_train_parity_hsdp) {
  for (const bool reshard : {true, false}) {
    for (const int64_t hidden : {8, 7}) {  // even and uneven rows
      run_ranks(4, [=](const ProcessGroupPtr& world) {
        Stacks stacks(2, 5, hidden);
        const auto mesh =
            std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"replicate", "shard"});
        shard_stack(stacks.model, {.mesh = mesh, .reshard_after_forward = reshard});
        for (uint64_t step = 0; step < 3; ++step) {
          stacks.plain.zero_grad();
          stacks.model.zero_grad();
          for (int micro = 0; micro < 2; ++micro) {  // with communication in both
            const at::Tensor x = fixed({4, 5}, data_seed(step, *world) + 1000 * micro);
            stacks.plain.forward(x).pow(2).sum().backward();
            stacks.model.forward(x).pow(2).sum().backward();
          }
          average_gradients(stacks.plain, *world);
          expect_gradients_of(stacks.plain, stacks.model, 2e-6);  // replicas: different order of additions
          descend(stacks.plain, 1e-3);
          descend(stacks.model, 1e-3);
        }
        expect_weights_of(stacks.plain, stacks.model, 1e-6);
      });
    }
  }
}

TEST(FullyShardTraining, test_train_parity_single_worldsize1) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    const Sizes sizes{{7, 3}, {7}, {3, 7}, {3}};
    FormulaImpl plain(sizes, two_layers);
    Formula unit(sizes, two_layers);
    fully_shard(unit, {.mesh = recording_mesh(world, {1}, {"shard"}, calls)});
    expect_adam_parity(plain, unit, 3, *world);
    EXPECT_TRUE(calls.empty());
  });
}

// Replicas only (torch.distributed's replicate): one rank in the sharding dimension.

TEST(FullyShardReplicate, test_train_parity_single_group) {
  run_ranks(3, [](const ProcessGroupPtr& world) {
    const Sizes sizes{{7, 3}, {7}, {3, 7}, {3}};
    FormulaImpl plain(sizes, two_layers);
    Formula unit(sizes, two_layers);
    fully_shard(unit, {.mesh = replicas_only(world)});
    expect_adam_parity(plain, unit, 3, *world);
  });
}

TEST(FullyShardReplicate, test_train_parity_multi_group) {
  run_ranks(3, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    Stacks stacks(3, 5, 7);
    shard_stack(stacks.model, {.mesh = recording_mesh(world, {3, 1}, {"replicate", "shard"}, calls)});
    for (uint64_t step = 0; step < 3; ++step) {
      const at::Tensor x = fixed({4, 5}, data_seed(step, *world));
      stacks.plain.zero_grad();
      stacks.model.zero_grad();
      calls.clear();
      stacks.plain.forward(x).pow(2).sum().backward();
      stacks.model.forward(x).pow(2).sum().backward();
      average_gradients(stacks.plain, *world);
      expect_gradients_of(stacks.plain, stacks.model);
      EXPECT_EQ(count(calls, "all_reduce"), 4);  // one per group, and nothing else
      EXPECT_EQ(calls.size(), 4U);
      descend(stacks.plain);
      descend(stacks.model);
    }
  });
}

}  // namespace
}  // namespace megashard::testing
