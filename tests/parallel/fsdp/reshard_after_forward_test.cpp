// When groups are unsharded, resharded and reduced: order of events, prefetch, reshard_after_forward, lists, nesting.
// schedule_test.cpp has PyTorch's own cases.

#include "tests/support/chain.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

TEST(FsdpSchedule, ReverseOrderOfForwardIsPrefetchedInBackward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    for (int step = 0; step < 2; ++step) {
      const at::Tensor loss = chain.forward();
      EXPECT_EQ(chain.events, (Events{"unshard Formula", "unshard a", "reshard a", "unshard b", "reshard b",
                                      "unshard c", "reshard c"}));
      chain.backward(loss);
      EXPECT_EQ(chain.events,
                (Events{"pre_backward Formula", "unshard c", "pre_backward c", "unshard b", "post_backward c",
                        "reshard c", "reduce c", "pre_backward b", "unshard a", "post_backward b", "reshard b",
                        "reduce b", "pre_backward a", "post_backward a", "reshard a", "reduce a",
                        "post_backward Formula", "reshard Formula", "reduce Formula"}));
    }
  });
}

TEST(FsdpSchedule, ExplicitListsReplaceTheDefault) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    torch::nn::Module* const after_a[] = {chain.units[1].get(), chain.units[2].get()};
    torch::nn::Module* const before_c[] = {chain.units[1].get(), chain.units[0].get()};
    set_modules_to_forward_prefetch(*chain.units[0], after_a);
    set_modules_to_backward_prefetch(*chain.units[2], before_c);
    const at::Tensor loss = chain.forward();
    EXPECT_EQ(chain.events, (Events{"unshard Formula", "unshard a", "unshard b", "unshard c", "reshard a", "reshard b",
                                    "reshard c"}));
    chain.backward(loss);
    EXPECT_EQ(chain.events, (Events{"pre_backward Formula", "unshard c", "pre_backward c", "unshard b", "unshard a",
                                    "post_backward c", "reshard c", "reduce c", "pre_backward b", "post_backward b",
                                    "reshard b", "reduce b", "pre_backward a", "post_backward a", "reshard a",
                                    "reduce a", "post_backward Formula", "reshard Formula", "reduce Formula"}));
  });
}

TEST(FsdpSchedule, APrefetchThatNobodyUsesIsFreedAtTheEndOfBackward) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    torch::nn::Module* const late[] = {chain.units[2].get()};
    set_modules_to_backward_prefetch(*chain.units[0], late);
    chain.backward(chain.forward());
    EXPECT_EQ(chain.events.back(), "reshard c");  // otherwise the next forward would use old weights
    for (const auto& unit : chain.units) EXPECT_EQ(unit->w[0].size(0), 3);
  });
}

TEST(FsdpSchedule, ManyForwardsOfTheSameWeightsGatherThemOnce) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    const c10::NoGradGuard no_grad;
    run_unsharded(chain.root, [&] {
      chain.forward();
      EXPECT_EQ(chain.events, (Events{"unshard Formula", "unshard a", "unshard b", "unshard c"}));
      chain.forward();
      EXPECT_EQ(chain.units[0]->w[0].size(0), 6);
      EXPECT_EQ(std::count(chain.events.begin(), chain.events.end(), "unshard a"), 0);
    });
    for (const auto& unit : chain.units) EXPECT_EQ(unit->w[0].size(0), 3);
    const auto fail = [&] {
      chain.forward();
      throw std::runtime_error("stop");
    };
    EXPECT_THROW(run_unsharded(chain.root, fail), std::runtime_error);
    EXPECT_EQ(chain.units[0]->w[0].size(0), 3);
    chain.forward();  // as before: resharded
    EXPECT_EQ(chain.units[0]->w[0].size(0), 3);
  });
}

TEST(FsdpSchedule, WhatForwardKeepsIsNotGatheredAgain) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = false});
    const at::Tensor loss = chain.forward();
    EXPECT_EQ(chain.events, (Events{"unshard Formula", "unshard a", "unshard b", "unshard c"}));
    EXPECT_EQ(chain.units[0]->w[0].size(0), 6);
    chain.backward(loss);
    EXPECT_EQ(std::count(chain.events.begin(), chain.events.end(), "unshard a"), 0);
    EXPECT_EQ(chain.units[0]->w[0].size(0), 3);

    set_reshard_after_forward(chain.root, true);
    chain.forward();
    EXPECT_EQ(std::count(chain.events.begin(), chain.events.end(), "reshard Formula"), 1);
  });
}

TEST(FsdpSchedule, EvaluationKeepsNothingByDefault) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    Chain smaller;
    smaller.shard({.mesh = flat_mesh(world), .reshard_after_forward = ReshardAfterForward::to(2)});
    const c10::NoGradGuard evaluation;
    for (Chain* each : {&chain, &smaller}) {
      const at::Tensor before = each->forward();
      each->root.w[0].mul_(2);  // sharded: the next forward sees it
      each->units[0]->w[0].mul_(2);
      EXPECT_FALSE(at::equal(each->forward(), before));
    }
  });
}

TEST(FsdpSchedule, SlicesKeptOnFewerRanksDoNotOutliveAChangeOfTheWeights) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = ReshardAfterForward::to(2)});
    const at::Tensor before = chain.forward();  // no backward follows
    {
      const c10::NoGradGuard no_grad;
      for (auto& unit : chain.units) unit->w[0].mul_(2);
    }
    EXPECT_TRUE(at::equal(chain.forward(), before * 8));
  });
}

TEST(FsdpSchedule, AListIsOneGroupFromItsFirstModuleToItsLast) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    torch::nn::Module* const list[] = {chain.units[0].get(), chain.units[2].get()};
    fully_shard(list, {.mesh = flat_mesh(world)});
    fully_shard(*chain.units[1], {.mesh = flat_mesh(world)});
    fully_shard(chain.root, {.mesh = flat_mesh(world)});
    chain.watch();
    const at::Tensor loss = chain.forward();
    EXPECT_EQ(chain.events, (Events{"unshard Formula", "unshard a", "unshard b", "reshard b", "reshard a"}));
    chain.backward(loss);
    for (const auto& unit : chain.units) {
      EXPECT_EQ(unit->w[0].size(0), 3);
      EXPECT_TRUE(unit->w[0].grad().defined());
    }
  });
}

TEST(FsdpSchedule, NestedUnitsAndUnitsWithoutParameters) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    auto build = [&](bool shard) {
      auto inner = std::make_shared<Formula>(Sizes{{6, 6}}, linear);
      auto middle =
          std::make_shared<Formula>(Sizes{}, [inner](const Weights&, at::Tensor x) { return inner->forward(x) + x; });
      auto root = std::make_shared<Formula>(
          Sizes{{5, 6}}, [middle](const Weights& w, at::Tensor x) { return at::linear(middle->forward(x), w[0]); });
      middle->register_module("inner", inner);
      root->register_module("middle", middle);
      if (shard) {
        for (auto& unit : {inner, middle, root}) fully_shard(*unit, {.mesh = flat_mesh(world)});
      }
      return root;
    };
    const auto plain = build(false), root = build(true);
    plain->forward(fixed({4, 6}, 1)).sum().backward();
    root->forward(fixed({4, 6}, 1)).sum().backward();
    const auto expected = plain->named_parameters();
    for (const auto& item : root->named_parameters()) {
      EXPECT_TRUE(at::equal(item.value().grad(), part_like(expected[item.key()].grad(), item.value()))) << item.key();
    }
  });
}

TEST(FsdpSchedule, UnshardAndReshardByHand) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    unshard(*chain.units[1]);
    EXPECT_TRUE(at::equal(chain.units[1]->w[0], fixed({6, 6}, 20)));
    reshard(*chain.units[1]);
    EXPECT_EQ(chain.units[1]->w[0].size(0), 3);
    unshard(*chain.units[1]);
    EXPECT_EQ(reshard_and_view(chain.units[1]->w[0]).local.size(0),
              3);  // resharded: the rows may change
    EXPECT_EQ(chain.units[1]->w[0].size(0), 3);
  });
}

}  // namespace
}  // namespace megashard::testing
