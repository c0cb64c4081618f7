// test_fully_shard_training.py: training sharded equals training whole, as DistributedDataParallel
// does it. Gradients and weights are compared bit for bit: groups on the CPU add in rank order.

#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <torch/optim/adam.h>

#include <chrono>
#include <thread>

#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

const std::vector<ReshardAfterForward>& all_reshards() {
  static const std::vector<ReshardAfterForward> all{{}, true, false, ReshardAfterForward::to(2)};
  return all;
}

uint64_t data_seed(uint64_t step, const ProcessGroup& world) {
  return 100 + 10 * step + static_cast<uint64_t>(world.rank());
}

/// Blocks and a head, plain and sharded, with the same weights.
struct Stacks {
  Stacks(int depth, int64_t width, int64_t hidden) : plain(depth, width, hidden), model(depth, width, hidden) {
    fill_weights(plain);
    copy_weights(plain, model);
  }
  StackImpl plain;
  Stack model;
};

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

/// Ranks that are late by turns, in forward and in backward.
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
    // Then one unit by itself: its backward reduces and frees as the root's does.
    plain.units[0]->forward(x).sum().backward();
    chain.events.clear();
    chain.units[0]->forward(x).sum().backward();
    EXPECT_EQ(chain.events, (Events{"unshard a", "reshard a", "pre_backward a", "unshard a", "post_backward a",
                                    "reshard a", "reduce a"}));
    expect_sharded(chain.root);
    // Gradients were averaged twice on the shard and once, after adding, on the plain model.
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
        expect_gradients_of(plain.root, chain.root, 1e-6);  // one reduction for each use
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

// Lists of modules of which some do not run with the others.

/// The first and the third unit of the chain are one group.
void shard_as_list(Chain& chain, const FullyShardOptions& options) {
  torch::nn::Module* const list[] = {chain.units[0].get(), chain.units[2].get()};
  fully_shard(list, options);
  fully_shard(*chain.units[1], options);
  fully_shard(chain.root, options);
  chain.watch();
}

/// The root returns what precedes the last unit, which the caller runs by itself, on chunks.
void leave_out_last(Chain& chain) {
  chain.root.body = [&chain](const Weights& w, at::Tensor x) {
    return at::linear(chain.units[1]->forward(chain.units[0]->forward(x)), w[0]);
  };
}

at::Tensor chunked_loss(Chain& chain, const at::Tensor& hidden) {
  at::Tensor loss;
  for (const auto& chunk : hidden.chunk(2)) {
    const at::Tensor part = chain.units[2]->forward(chunk).pow(2).sum();
    loss = loss.defined() ? loss + part : part;
  }
  return loss;
}

/// Equal to the plain chain within the order of additions: a unit that is called on chunks reduces
/// for each.
void expect_chunked_parity(const ProcessGroupPtr& world, const FullyShardOptions& options, int microbatches,
                           const std::function<void(Chain&, int)>& before) {
  Chain plain, chain;
  leave_out_last(plain);
  leave_out_last(chain);
  shard_as_list(chain, options);
  for (uint64_t step = 0; step < 2; ++step) {
    plain.root.zero_grad();
    chain.root.zero_grad();
    for (int micro = 0; micro < microbatches; ++micro) {
      before(chain, micro);
      const at::Tensor x = fixed({4, 6}, data_seed(step, *world) + 1000 * micro) * 0.1;
      const at::Tensor expected = chunked_loss(plain, plain.root.forward(x));
      const at::Tensor loss = chunked_loss(chain, chain.root.forward(x));
      ASSERT_TRUE(at::equal(loss, expected));
      expected.backward();
      loss.backward();
    }
    average_gradients(plain.root, *world);
    expect_gradients_of(plain.root, chain.root, 1e-6);
    expect_sharded(chain.root);
  }
}

TEST(FullyShardTraining, test_partial_group_forward_then_standalone) {
  for (const bool reshard : {true, false}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      expect_chunked_parity(world, {.mesh = flat_mesh(world), .reshard_after_forward = reshard}, 1, [](Chain&, int) {});
    });
  }
}

TEST(FullyShardTraining, test_partial_group_forward_grad_accum_chunked) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    expect_chunked_parity(world, {.mesh = flat_mesh(world), .reshard_after_forward = true}, 3,
                          [](Chain& chain, int micro) { set_requires_gradient_sync(chain.root, micro == 2); });
  });
}

TEST(FullyShardTraining, test_partial_group_reshard_toggle) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    expect_chunked_parity(world, {.mesh = flat_mesh(world), .reshard_after_forward = true}, 2,
                          [](Chain& chain, int micro) {
                            set_reshard_after_forward(chain.root, micro == 1);
                            set_reshard_after_backward(chain.root, micro == 1);
                          });
  });
}

TEST(FullyShardTraining, test_double_partial_forward_then_backward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    leave_out_last(plain);
    leave_out_last(chain);
    shard_as_list(chain, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    const at::Tensor x = fixed({4, 6}, data_seed(0, *world)) * 0.1, y = fixed({4, 6}, data_seed(1, *world)) * 0.1;
    (plain.root.forward(x).sum() + plain.root.forward(y).pow(2).sum()).backward();
    (chain.root.forward(x).sum() + chain.root.forward(y).pow(2).sum()).backward();
    average_gradients(plain.root, *world);
    expect_gradients_of(plain.root, chain.root, 1e-6);
  });
}

TEST(FullyShardTraining, test_grouped_module_cast_forward_inputs) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Chain chain;
    std::vector<at::ScalarType> seen;
    for (auto& unit : chain.units) {
      unit->body = [&](const Weights& w, at::Tensor x) {
        seen.push_back(x.scalar_type());
        return at::linear(x.to(w[0].scalar_type()), w[0]).to(at::kFloat);
      };
    }
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.param_dtype = at::kBFloat16;
    torch::nn::Module* const list[] = {chain.units[0].get(), chain.units[1].get(), chain.units[2].get()};
    fully_shard(list, options);
    fully_shard(chain.root, {.mesh = flat_mesh(world)});
    chain.forward().backward();
    EXPECT_EQ(seen, (std::vector<at::ScalarType>(3, at::kBFloat16)));
  });
}

TEST(FullyShardTraining, test_reset_iter_state_after_exception) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    bool fail = false;
    for (Chain* each : {&plain, &chain}) {
      each->units[2]->body = [&](const Weights& w, at::Tensor x) {
        TORCH_CHECK(!fail, "forward failed on purpose");
        return at::linear(x, w[0]);
      };
    }
    shard_as_list(chain, {.mesh = flat_mesh(world)});
    for (int step = 0; step < 2; ++step) {
      fail = true;
      contains(message_of([&] { chain.forward(); }), "forward failed on purpose");
      expect_sharded(chain.root);
      fail = false;
      plain.root.zero_grad();
      chain.root.zero_grad();
      plain.forward().backward();
      chain.forward().backward();
      expect_gradients_of(plain.root, chain.root);
    }
  });
}

// Tied weights.

/// An embedding, blocks that are units, and a head with the embedding's weight.
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
  const at::Tensor before = sharded_view(model.table).local.clone();
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
  const at::Tensor after = sharded_view(model.table).local;
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
    const std::string sentence = message_of([&] { fully_shard(chain.root, {.mesh = flat_mesh(world)}); });
    contains(sentence, "'w0' and 'head' are one tensor in two groups");
    contains(sentence, "untied");
  });
}

TEST(FullyShardTraining, test_layer_by_layer_shard_no_false_positive) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    for (int i = 0; i < 20; ++i) {  // each is gone before the next, whose tensors take its places
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

// Accumulation, with exact counts of collectives.

int64_t count(const std::vector<CollectiveCall>& calls, const std::string& operation) {
  return std::count_if(calls.begin(), calls.end(), [&](const auto& call) { return call.operation == operation; });
}

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
    expect_gradients_of(stacks.plain, model, 1e-6);  // sums of averages against averages of sums

    // Gathers: the root stays full from forward to backward unless it must be freed; whatever is
    // not freed after backward serves the next microbatch.
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
    for (const auto& item : stacks.plain.named_parameters()) {  // the next step starts equal
      const at::Tensor mine = model.named_parameters()[item.key()];
      sharded_view(mine).local.copy_(part_like(item.value(), mine));
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
      EXPECT_EQ(count(calls, "all_gather"), 3);  // each group once a step
      EXPECT_EQ(count(calls, "reduce_scatter"), 3);
      average_gradients(stacks.plain, *world);
      expect_gradients_of(stacks.plain, model);
      expect_sharded(model);
      descend(stacks.plain);
      descend(model);
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
          expect_gradients_of(stacks.plain, stacks.model, 2e-6);  // replicas: another order
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

// Replicas only (replicate of torch.distributed): one rank in the dimension that shards.

DeviceMeshPtr replicas_only(const ProcessGroupPtr& world) {
  return std::make_shared<DeviceMesh>(world, std::vector<int>{world->size(), 1},
                                      std::vector<std::string>{"replicate", "shard"});
}

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
      EXPECT_EQ(count(calls, "all_reduce"), 4);  // one a group, and nothing else
      EXPECT_EQ(calls.size(), 4U);
      descend(stacks.plain);
      descend(stacks.model);
    }
  });
}

TEST(FullyShardReplicate, test_train_parity_with_shared_params) {
  run_ranks(2, [](const ProcessGroupPtr& world) { expect_tied_parity(world, 13, replicas_only(world)); });
}

}  // namespace
}  // namespace megashard::testing
