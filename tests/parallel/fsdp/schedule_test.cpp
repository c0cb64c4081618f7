// test_fully_shard_comm.py: number and content of collectives, and the order in which groups are gathered and reduced.
// Each test has its upstream test's name.

#include <ostream>

#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

using Calls = std::vector<CollectiveCall>;

const Sizes& odd_sizes() {
  static const Sizes sizes{{13, 3}, {4}, {1, 6}, {5, 2, 3}, {8, 8}, {2, 7}};
  return sizes;
}

/// The loss contains every weight, with the rank's own factor.
at::Tensor sum_of_squares(const Weights& w, at::Tensor x) {
  at::Tensor y = x.sum() * 0;
  for (const auto& each : w) y = y + (each * each).sum() * x[0];
  return y;
}

TEST(FullyShardComm, test_all_gather_fp32) {
  for (const int ranks : {2, 4, 8}) {
    run_ranks(ranks, [=](const ProcessGroupPtr& world) {
      const FormulaImpl plain(odd_sizes(), linear);
      for (const auto& reshard : {ReshardAfterForward(true), ReshardAfterForward::to(2)}) {
        std::vector<at::Tensor> seen;
        Formula unit(odd_sizes(), [&](const Weights& w, at::Tensor x) {
          for (const auto& each : w) seen.push_back(each.detach().clone());
          return sum_of_squares(w, x);
        });
        fully_shard(unit, {.mesh = flat_mesh(world), .reshard_after_forward = reshard});
        const at::Tensor loss = unit.forward(fixed({1}, 3).requires_grad_());
        // Gathered again for backward, over all ranks or from the slices on two of them. Each weight is freed when its
        // gradient is complete.
        seen.resize(2 * plain.w.size());
        for (size_t i = 0; i < plain.w.size(); ++i) {
          unit.w[i].register_hook([&, i](const at::Tensor&) { seen[plain.w.size() + i] = unit.w[i].detach().clone(); });
        }
        loss.backward();
        ASSERT_TRUE(seen.back().defined());
        for (size_t i = 0; i < seen.size(); ++i) EXPECT_TRUE(at::equal(seen[i], plain.w[i % plain.w.size()])) << i;
      }
    });
  }
}

/// The packed reduction equals an all-reduce of each gradient in the reduce dtype; fp16, whose sums may overflow, is
/// divided by `before` first and by the rest afterwards.
void expect_reduce_scatter_in(at::ScalarType dtype, int ranks, double before) {
  run_ranks(ranks, [=](const ProcessGroupPtr& world) {
    Calls calls;
    FullyShardOptions options{.mesh = recording_mesh(world, {ranks}, {"shard"}, calls)};
    options.mixed_precision.reduce_dtype = dtype;
    FormulaImpl plain(odd_sizes(), sum_of_squares);
    Formula unit(odd_sizes(), sum_of_squares);
    fully_shard(unit, options);
    const at::Tensor x = fixed({1}, static_cast<uint64_t>(10 + world->rank()));
    plain.forward(x).backward();
    unit.forward(x).backward();
    ASSERT_EQ(count(calls, "reduce_scatter"), 1);
    EXPECT_EQ(calls.back().dtype, dtype);
    for (const auto& w : plain.w) {
      at::Tensor reduced = w.grad().to(dtype);
      if (before == 0) {
        world->all_reduce(reduced, ReduceOp::kAvg).wait();
      } else {
        reduced.div_(before);
        world->all_reduce(reduced, ReduceOp::kSum).wait();
        reduced.div_(ranks / before);
      }
      w.mutable_grad() = reduced.to(at::kFloat);
    }
    expect_gradients_of(plain, unit);
  });
}

TEST(FullyShardComm, test_reduce_scatter_fp32) {
  for (const int ranks : {2, 3, 8}) expect_reduce_scatter_in(at::kFloat, ranks, 0);
}

TEST(FullyShardComm, test_reduce_scatter_fp16) {
  expect_reduce_scatter_in(at::kHalf, 2, 2);
  expect_reduce_scatter_in(at::kHalf, 3, 2);
  expect_reduce_scatter_in(at::kHalf, 4, 2);
  expect_reduce_scatter_in(at::kHalf, 8, 4);
}

// Number of collectives in one pass.

struct Counts {
  int64_t forward_gathers, backward_gathers, backward_scatters;
  bool operator==(const Counts&) const = default;
  friend void PrintTo(const Counts& c, std::ostream* out) {
    *out << c.forward_gathers << " gathers in forward, " << c.backward_gathers << " and " << c.backward_scatters
         << " reduce-scatters in backward";
  }
};

Counts count_pass(Chain& chain, Calls& calls, const std::function<void()>& between = {}) {
  calls.clear();
  const at::Tensor loss = chain.forward();
  Counts counts{count(calls, "all_gather"), 0, 0};
  EXPECT_EQ(count(calls, "reduce_scatter"), 0);
  if (between) between();
  calls.clear();
  loss.backward();
  counts.backward_gathers = count(calls, "all_gather");
  counts.backward_scatters = count(calls, "reduce_scatter");
  EXPECT_EQ(counts.backward_gathers + counts.backward_scatters, static_cast<int64_t>(calls.size()));
  return counts;
}

TEST(FullyShardComm, test_fully_shard_communication_count) {
  const std::vector<std::pair<ReshardAfterForward, Counts>> cases = {
      {true, {4, 4, 4}},
      {false, {4, 0, 4}},
      {{}, {4, 3, 4}},  // the root's is kept
      {ReshardAfterForward::to(2), {4, 4, 4}},
  };
  for (const auto& [reshard, expected] : cases) {
    run_ranks(4, [&, reshard = reshard, expected = expected](const ProcessGroupPtr& world) {
      Calls calls;
      Chain chain(3);
      chain.shard({.mesh = recording_mesh(world, {4}, {"shard"}, calls), .reshard_after_forward = reshard});
      for (int step = 0; step < 2; ++step) EXPECT_EQ(count_pass(chain, calls), expected);
    });
  }
}

TEST(FullyShardComm, test_manual_reshard_with_reshard_after_forward_false) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Calls calls;
    Chain chain(3);
    chain.shard({.mesh = recording_mesh(world, {2}, {"shard"}, calls), .reshard_after_forward = false});
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(count_pass(chain, calls,
                           [&] {
                             for (auto& unit : chain.units) reshard(*unit);
                             reshard(chain.root);
                           }),
                (Counts{4, 4, 4}));
    }
    EXPECT_EQ(count_pass(chain, calls, [&] { reshard(*chain.units[1]); }), (Counts{4, 1, 4}));
  });
}

TEST(FullyShardComm, test_set_reshard_after_forward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Calls calls;
    Chain chain(3);
    chain.shard({.mesh = recording_mesh(world, {2}, {"shard"}, calls)});
    EXPECT_EQ(count_pass(chain, calls), (Counts{4, 3, 4}));
    set_reshard_after_forward(chain.root, true, /*recurse=*/false);
    EXPECT_EQ(count_pass(chain, calls), (Counts{4, 4, 4}));
    set_reshard_after_forward(chain.root, false, /*recurse=*/false);
    EXPECT_EQ(count_pass(chain, calls), (Counts{4, 3, 4}));
    set_reshard_after_forward(chain.root, false, /*recurse=*/true);
    EXPECT_EQ(count_pass(chain, calls), (Counts{4, 0, 4}));
    set_reshard_after_forward(chain.root, true, /*recurse=*/true);
    EXPECT_EQ(count_pass(chain, calls), (Counts{4, 4, 4}));
  });
}

// Exact order of gathers and of ends of backward.

TEST(FullyShardComm, test_fully_shard_backward_prefetch) {
  const std::vector<ReshardAfterForward> reshards = {true, false, {}, ReshardAfterForward::to(2)};
  for (const auto& reshard : reshards) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      using Kind = ReshardAfterForward::Kind;
      Chain chain(3);
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      const bool root_is_kept = reshard.kind == Kind::kDefault;
      for (int step = 0; step < 2; ++step) {
        const at::Tensor loss = chain.forward();
        EXPECT_EQ(chain.gathers_and_post_backwards(), gathers({"Formula", "a", "b", "c"}));
        chain.backward(loss);
        Events expected = {"unshard Formula", "unshard c",       "unshard b",       "post_backward c",
                           "unshard a",       "post_backward b", "post_backward a", "post_backward Formula"};
        if (root_is_kept) expected.erase(expected.begin());
        if (reshard.kind == Kind::kNever)
          expected = {"post_backward c", "post_backward b", "post_backward a", "post_backward Formula"};
        EXPECT_EQ(chain.gathers_and_post_backwards(), expected);
      }

      // Two forwards, the second on the first one's output, and one backward through both.
      chain.events.clear();
      const at::Tensor loss = chain.root.forward(chain.root.forward(fixed({4, 6}, 1).requires_grad_())).sum();
      Events twice = gathers({"Formula", "a", "b", "c"});
      if (root_is_kept) {
        for (const char* name : {"a", "b", "c"}) twice.push_back(std::string("unshard ") + name);
      } else if (reshard.kind != Kind::kNever) {
        twice.insert(twice.end(), {"unshard Formula", "unshard a", "unshard b", "unshard c"});
      }
      EXPECT_EQ(chain.gathers_and_post_backwards(), twice);
      chain.backward(loss);
      const Events gathering = {"unshard c",       "unshard b",       "post_backward c",      "unshard a",
                                "post_backward b", "post_backward a", "post_backward Formula"};
      Events expected;
      if (reshard.kind == Kind::kAlways || reshard.kind == Kind::kTo) expected.push_back("unshard Formula");
      if (reshard.kind == Kind::kNever) {
        expected = {"post_backward c", "post_backward b", "post_backward a", "post_backward Formula"};
      } else {
        expected.insert(expected.end(), gathering.begin(), gathering.end());
      }
      expected.push_back("unshard Formula");  // freed by the later use, whose backward came first
      expected.insert(expected.end(), gathering.begin(), gathering.end());
      EXPECT_EQ(chain.gathers_and_post_backwards(), expected);
      expect_sharded(chain.root);
    });
  }
  // A branch that backward does not reach: its prefetched units are freed at the end.
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    Chain plain, chain;
    bool through_b = true;
    for (Chain* each : {&plain, &chain}) {
      each->root.body = [&through_b, each](const Weights& w, at::Tensor x) {
        x = each->units[0]->forward(x);
        const at::Tensor b = each->units[1]->forward(x), c = each->units[2]->forward(x);
        return at::linear(through_b ? b : c, w[0]);
      };
    }
    chain.shard({.mesh = flat_mesh(world)});
    for (int step = 0; step < 4; ++step) {
      through_b = step % 2 == 0;
      plain.root.zero_grad();
      chain.root.zero_grad();
      plain.forward().backward();
      const at::Tensor loss = chain.forward();
      EXPECT_EQ(chain.gathers_and_post_backwards(), gathers({"Formula", "a", "b", "c"}));
      chain.backward(loss);
      EXPECT_EQ(chain.gathers_and_post_backwards(),
                through_b ? (Events{"unshard c", "unshard b", "unshard a", "post_backward b", "post_backward a",
                                    "post_backward Formula"})
                          : (Events{"unshard c", "unshard b", "post_backward c", "unshard a", "post_backward a",
                                    "post_backward Formula"}));
      expect_gradients_of(plain.root, chain.root);
      expect_sharded(chain.root);
    }
  });
}

TEST(FullyShardComm, test_set_modules_to_forward_prefetch) {
  for (const size_t ahead : {1, 2}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      Chain chain(4);
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
      for (size_t i = 0; i < 4; ++i) {
        std::vector<torch::nn::Module*> next;
        for (size_t k = i + 1; k <= i + ahead && k < 4; ++k) next.push_back(chain.units[k].get());
        set_modules_to_forward_prefetch(*chain.units[i], next);
      }
      for (int step = 0; step < 2; ++step) {
        const at::Tensor loss = chain.forward();
        EXPECT_EQ(chain.events, ahead == 1
                                    ? (Events{"unshard Formula", "unshard a", "unshard b", "reshard a", "unshard c",
                                              "reshard b", "unshard d", "reshard c", "reshard d", "reshard Formula"})
                                    : (Events{"unshard Formula", "unshard a", "unshard b", "unshard c", "reshard a",
                                              "unshard d", "reshard b", "reshard c", "reshard d", "reshard Formula"}));
        chain.backward(loss);  // as without lists
        EXPECT_EQ(
            chain.gathers_and_post_backwards(),
            (Events{"unshard Formula", "unshard d", "unshard c", "post_backward d", "unshard b", "post_backward c",
                    "unshard a", "post_backward b", "post_backward a", "post_backward Formula"}));
      }
    });
  }
}

TEST(FullyShardComm, test_set_modules_to_backward_prefetch) {
  for (const size_t ahead : {1, 2}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      Chain chain(4);
      chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
      for (size_t i = 0; i < 4; ++i) {
        std::vector<torch::nn::Module*> next;
        for (size_t k = 1; k <= ahead && k <= i; ++k) next.push_back(chain.units[i - k].get());
        set_modules_to_backward_prefetch(*chain.units[i], next);
      }
      for (int step = 0; step < 2; ++step) {
        const at::Tensor loss = chain.forward();
        EXPECT_EQ(chain.gathers_and_post_backwards(), gathers({"Formula", "a", "b", "c", "d"}));
        chain.backward(loss);
        EXPECT_EQ(chain.gathers_and_post_backwards(),
                  ahead == 1 ? (Events{"unshard Formula", "unshard d", "unshard c", "post_backward d", "unshard b",
                                       "post_backward c", "unshard a", "post_backward b", "post_backward a",
                                       "post_backward Formula"})
                             : (Events{"unshard Formula", "unshard d", "unshard c", "unshard b", "post_backward d",
                                       "unshard a", "post_backward c", "post_backward b", "post_backward a",
                                       "post_backward Formula"}));
      }
    });
  }
}

TEST(FullyShardComm, test_fully_shard_multi_module_backward_prefetch) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain(6), chain(6);
    for (size_t i = 0; i < 6; i += 2) {  // pairs: a with b, c with d, e with f
      torch::nn::Module* const pair[] = {chain.units[i].get(), chain.units[i + 1].get()};
      fully_shard(pair, {.mesh = flat_mesh(world)});
    }
    fully_shard(chain.root, {.mesh = flat_mesh(world)});
    chain.watch();
    for (int step = 0; step < 2; ++step) {
      plain.root.zero_grad();
      chain.root.zero_grad();
      plain.forward().backward();
      const at::Tensor loss = chain.forward();
      EXPECT_EQ(chain.events, (Events{"unshard Formula", "unshard a", "reshard a", "unshard c", "reshard c",
                                      "unshard e", "reshard e"}));
      chain.backward(loss);
      EXPECT_EQ(chain.gathers_and_post_backwards(),
                (Events{"unshard e", "unshard c", "post_backward e", "unshard a", "post_backward c", "post_backward a",
                        "post_backward Formula"}));
      expect_gradients_of(plain.root, chain.root);
      expect_sharded(chain.root);
    }
  });
}

TEST(FullyShardComm, test_fully_shard_multi_module_unused_module) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    torch::nn::Module* const list[] = {chain.units[0].get(), chain.units[2].get()};
    fully_shard(list, {.mesh = flat_mesh(world)});
    fully_shard(chain.root, {.mesh = flat_mesh(world)});
    for (Chain* each : {&plain, &chain}) {  // c never runs
      each->root.body = [each](const Weights& w, at::Tensor x) {
        return at::linear(each->units[1]->forward(each->units[0]->forward(x)), w[0]);
      };
    }
    chain.watch();
    for (int step = 0; step < 2; ++step) {
      plain.root.zero_grad();
      chain.root.zero_grad();
      plain.forward().backward();
      const at::Tensor loss = chain.forward();
      EXPECT_EQ(chain.events, (Events{"unshard Formula", "unshard a", "reshard a"}));
      chain.backward(loss);
      EXPECT_EQ(chain.gathers_and_post_backwards(), (Events{"unshard a", "post_backward a", "post_backward Formula"}));
      expect_gradients_of(plain.root, chain.root);
      EXPECT_FALSE(chain.units[2]->w[0].grad().defined());
      expect_sharded(chain.root);
    }
  });
}

TEST(FullyShardComm, test_backward_misprefetch) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
    // Wrong order: each prefetches a unit whose backward is already done.
    for (size_t i = 0; i < 3; ++i) {
      torch::nn::Module* const wrong[] = {chain.units[(i + 1) % 3].get()};
      set_modules_to_backward_prefetch(*chain.units[i], wrong);
    }
    for (int step = 0; step < 3; ++step) {
      plain.root.zero_grad();
      chain.root.zero_grad();
      plain.forward().backward();
      chain.forward().backward();
      expect_gradients_of(plain.root, chain.root);
      expect_sharded(chain.root);
      descend(plain.root, 1e-4);
      descend(chain.root, 1e-4);
    }
  });
}

TEST(FullyShardComm, test_size1_reduceop) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto alone = world->subgroup({world->rank()}, "alone");
    // One rank in the sharding dimension: no communication, and gradients stay as they are.
    Calls calls;
    const auto mesh =
        std::make_shared<DeviceMesh>(std::vector<ProcessGroupPtr>{std::make_shared<RecordingGroup>(alone, calls)},
                                     std::vector<std::string>{"shard"});
    FormulaImpl plain(odd_sizes(), sum_of_squares);
    Formula unit(odd_sizes(), sum_of_squares);
    fully_shard(unit, {.mesh = mesh});
    for (uint64_t step = 0; step < 2; ++step) {
      plain.zero_grad();
      unit.zero_grad();
      plain.forward(fixed({1}, step)).backward();
      unit.forward(fixed({1}, step)).backward();
      expect_gradients_of(plain, unit);
      descend(plain);
      descend(unit);
    }
    EXPECT_TRUE(calls.empty());

    // With replicas: one averaging all-reduce.
    const auto replicas = recording_mesh(world, {2, 1}, {"replicate", "shard"}, calls);
    FormulaImpl expected(odd_sizes(), sum_of_squares);
    Formula replica(odd_sizes(), sum_of_squares);
    fully_shard(replica, {.mesh = replicas});
    const at::Tensor x = fixed({1}, static_cast<uint64_t>(10 + world->rank()));
    expected.forward(x).backward();
    replica.forward(x).backward();
    ASSERT_EQ(calls.size(), 1U);
    EXPECT_EQ(calls[0].operation, "all_reduce");
    average_gradients(expected, *world);
    expect_gradients_of(expected, replica);
  });
}

}  // namespace
}  // namespace megashard::testing
