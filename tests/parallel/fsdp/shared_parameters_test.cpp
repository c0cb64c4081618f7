// test_fully_shard_training.py: tied weights within a group and across groups.

#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>

#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

/// An embedding, blocks that are units, and a head tied to the embedding.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(int64_t rows) : table(register_parameter("table", fixed({rows, 5}, 7) * 0.3)) {
    for (const char* name : {"first", "second"}) {
      blocks.push_back(register_module(name, std::make_shared<Hooked<BlockImpl>>(5, 7)));
      fill_weights(*blocks.back(), 20);
    }
    register_parameter("head", table);
  }
  at::Tensor forward(at::Tensor tokens) {
    at::Tensor x = at::embedding(table, tokens);
    for (const auto& block : blocks) x = block->forward(x);
    return at::linear(x, table);
  }
  at::Tensor table;
  std::vector<std::shared_ptr<Hooked<BlockImpl>>> blocks;
};

void expect_tied_parity(const ProcessGroupPtr& world, int64_t rows, const DeviceMeshPtr& mesh) {
  TiedImpl plain(rows);
  Hooked<TiedImpl> model(rows);
  for (const auto& block : model.blocks) fully_shard(*block, {.mesh = mesh});
  fully_shard(model, {.mesh = mesh});
  const at::Tensor before = reshard_and_view(model.table).local.clone();
  for (int64_t step = 0; step < 3; ++step) {
    const at::Tensor tokens = (at::arange(12).view({3, 4}) * 3 + step + world->rank()).remainder(rows);
    plain.zero_grad();
    model.zero_grad();
    const at::Tensor expected = plain.forward(tokens).pow(2).sum();
    const at::Tensor loss = model.forward(tokens).pow(2).sum();
    ASSERT_TRUE(at::equal(loss, expected));
    expected.backward();
    loss.backward();
    average_gradients(plain, *world);
    expect_gradients_of(plain, model);
    descend(plain);
    descend(model);
  }
  expect_weights_of(plain, model);
  const at::Tensor after = reshard_and_view(model.table).local;
  for (int64_t row = 0; row < after.size(0); ++row)
    EXPECT_FALSE(at::equal(after[row], before[row])) << "row " << row << " was never updated";
}

TEST(FullyShardTraining, test_train_parity_with_shared_params) {
  run_ranks(2, [](const ProcessGroupPtr& world) { expect_tied_parity(world, 12, flat_mesh(world)); });
}

TEST(FullyShardTraining, test_train_shared_params_uneven_shard) {
  run_ranks(3, [](const ProcessGroupPtr& world) { expect_tied_parity(world, 13, flat_mesh(world)); });
}

TEST(FullyShardTraining, test_shared_params_separate_fsdp_groups_error) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.root.register_parameter("head", chain.units[0]->w[0]);
    fully_shard(*chain.units[0], {.mesh = flat_mesh(world)});
    const std::string message = message_of([&] { fully_shard(chain.root, {.mesh = flat_mesh(world)}); });
    contains(message, "'w0' and 'head' are one tensor in two groups");
    contains(message, "untied");
  });
}

TEST(FullyShardTraining, AUnitInsideOneThatIsThereIsNoTie) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Chain chain;
    fully_shard(chain.root, {.mesh = flat_mesh(world)});
    const std::string message = message_of([&] { fully_shard(*chain.units[0], {.mesh = flat_mesh(world)}); });
    contains(message, "of a module around this one, which fully_shard took before: call it on inner modules first");
  });
}

TEST(FullyShardTraining, test_layer_by_layer_shard_no_false_positive) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    for (int i = 0; i < 20; ++i) {  // each is destroyed before the next, whose tensors reuse its addresses
      Chain one(1);
      fully_shard(*one.units[0], {.mesh = flat_mesh(world)});
    }
    Chain root(0);
    for (const char* name : {"a", "b", "c"}) {
      root.units.push_back(std::make_shared<Formula>(Sizes{{6, 6}}, linear));
      fully_shard(*root.units.back(), {.mesh = flat_mesh(world)});
      root.root.register_module(name, root.units.back());
    }
    fully_shard(root.root, {.mesh = flat_mesh(world)});
    root.forward().backward();
    EXPECT_EQ(root.root.named_parameters().size(), 4U);
  });
}

TEST(FullyShardReplicate, test_train_parity_with_shared_params) {
  run_ranks(2, [](const ProcessGroupPtr& world) { expect_tied_parity(world, 13, replicas_only(world)); });
}

}  // namespace
}  // namespace megashard::testing
