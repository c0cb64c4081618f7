// Which gradients are reduced, when, and in which dtype: replicas, accumulation, frozen, shared, ignored and unused
// parameters.

#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>

#include "tests/support/chain.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

DeviceMeshPtr hybrid_mesh(const ProcessGroupPtr& world) {
  return std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"replicate", "shard"});
}

/// Averages the plain model's gradients over all ranks.
void average(FormulaImpl& plain, ProcessGroup& world) {
  for (auto& w : plain.w) world.all_reduce(w.mutable_grad(), ReduceOp::kAvg).wait();
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  if (actual.numel() == 0) return;
  EXPECT_LE((actual - expected).abs().max().item<float>(), 1e-6 * expected.abs().max().item<float>());
}

TEST(FsdpReduction, WithoutAllReducePartialSumsWaitForABackwardWithIt) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}}, linear, {.mesh = hybrid_mesh(world)});
    for (int micro = 0; micro < 3; ++micro) {
      set_requires_all_reduce(twins.unit, micro == 2);
      const at::Tensor x = fixed({4, 6}, 10 * micro + world->rank());
      twins.plain.forward(x).pow(2).sum().backward();
      twins.unit.forward(x).pow(2).sum().backward();
      EXPECT_EQ(twins.unit.w[0].grad().defined(), micro == 2);
    }
    average(twins.plain, *world);
    expect_close(twins.unit.w[0].grad(), part_like(twins.plain.w[0].grad(), twins.unit.w[0]));
  });
}

TEST(FsdpReduction, AUnitCalledTwiceWithReplicasLosesNothing) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Twins twins({{6, 6}}, linear, {.mesh = hybrid_mesh(world)});
    const at::Tensor x = fixed({4, 6}, 1).requires_grad_();
    twins.plain.forward(twins.plain.forward(x)).sum().backward();
    twins.unit.forward(twins.unit.forward(x)).sum().backward();
    twins.expect_equal_gradients();
  });
}

TEST(FsdpReduction, AccumulationWithSyncAddsOnTheShard) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}}, linear, {.mesh = flat_mesh(world)});
    for (int micro = 0; micro < 3; ++micro) {
      const at::Tensor x = fixed({4, 6}, micro);
      twins.plain.forward(x).pow(2).sum().backward();
      twins.unit.forward(x).pow(2).sum().backward();
    }
    twins.expect_equal_gradients();
  });
}

TEST(FsdpReduction, AccumulationWithoutSyncReducesOnceAndKeepsEarlierGradients) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Twins twins({{5, 6}}, linear, {.mesh = flat_mesh(world)});
    for (int step = 0; step < 2; ++step) {  // no zero_grad between: the second step adds
      for (int micro = 0; micro < 2; ++micro) {
        set_requires_gradient_sync(twins.unit, micro == 1);
        set_reshard_after_backward(twins.unit, micro == 1);
        const at::Tensor x = fixed({4, 6}, 10 * step + micro);
        twins.plain.forward(x).sum().backward();
        twins.unit.forward(x).sum().backward();
      }
    }
    const at::Tensor expected = part_like(twins.plain.w[0].grad(), twins.unit.w[0]);
    expect_close(twins.unit.w[0].grad(), expected);
    twins.expect_sharded();
  });
}

TEST(FsdpReduction, WhatIsOwedIsReducedByABackwardThatDoesNotReachTheUnit) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    auto inner = std::make_shared<Formula>(Sizes{{6, 6}}, linear);
    bool through_inner = true;
    Formula root({{6, 6}}, [&](const Weights& w, at::Tensor x) {
      return at::linear(through_inner ? inner->forward(x) : x, w[0]);
    });
    root.register_module("inner", inner);
    fully_shard(*inner, {.mesh = flat_mesh(world)});
    fully_shard(root, {.mesh = flat_mesh(world)});
    set_requires_gradient_sync(root, false);
    root.forward(fixed({4, 6}, 1)).sum().backward();
    EXPECT_FALSE(inner->w[0].grad().defined());
    set_requires_gradient_sync(root, true);
    through_inner = false;
    root.forward(fixed({4, 6}, 1)).sum().backward();
    EXPECT_TRUE(inner->w[0].grad().defined());
    EXPECT_EQ(inner->w[0].grad().sizes(), inner->w[0].sizes());
  });
}

TEST(FsdpReduction, FrozenParametersInATrainableGroupAndThawedLater) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const Body two = [](const Weights& w, at::Tensor x) { return at::linear(at::linear(x, w[0]), w[1]); };
    Twins twins({{5, 6}, {3, 5}}, two, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    for (const bool trainable : {false, true, false}) {
      twins.zero_grad();
      twins.plain.w[0].set_requires_grad(trainable);
      twins.unit.w[0].set_requires_grad(trainable);
      const at::Tensor x = fixed({4, 6}, 1).requires_grad_(), y = fixed({4, 6}, 1).requires_grad_();
      twins.plain.forward(x).sum().backward();
      twins.unit.forward(y).sum().backward();
      EXPECT_EQ(twins.unit.w[0].grad().defined(), trainable);
      twins.expect_equal_gradients();
      EXPECT_TRUE(at::equal(y.grad(), x.grad()));
    }
  });
}

TEST(FsdpReduction, ParametersUsedOnSomeRanksOnly) {
  for (const int64_t rows : {5, 40000}) {  // packed, and large and even enough to be reduced in place
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      bool use_second = false, use_any = true;
      const Body maybe = [&](const Weights& w, at::Tensor x) {
        if (!use_any) return x * 1;
        at::Tensor y = x * w[0].sum();
        return use_second ? y + w[1].sum() : y;
      };
      Twins twins({{5}, {rows, 4}}, maybe, {.mesh = flat_mesh(world), .reshard_after_forward = true});
      auto gradient = [&](bool second_here, bool any_here) {
        twins.unit.zero_grad();
        use_second = second_here;
        use_any = any_here;
        twins.unit.forward(fixed({2}, 1).fill_(1).requires_grad_()).sum().backward();
        return twins.unit.w[1].grad();
      };
      EXPECT_FALSE(gradient(false, true).defined()) << "used nowhere";
      const at::Tensor on_one = gradient(world->rank() == 0, true);
      ASSERT_TRUE(on_one.defined());
      EXPECT_TRUE(at::equal(on_one, fixed(on_one.sizes(), 1).fill_(1)));  // the average of 2 and 0
      const at::Tensor none_of_the_group = gradient(true, world->rank() == 0);
      ASSERT_TRUE(none_of_the_group.defined());
      EXPECT_TRUE(at::equal(none_of_the_group, on_one));
      gradient(false, false);
      EXPECT_FALSE(twins.unit.w[0].grad().defined());
    });
  }
}

TEST(FsdpReduction, IgnoredParametersStayWholeAndLocal) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const Body two = [](const Weights& w, at::Tensor x) { return at::linear(x, w[0]) * w[1]; };
    FormulaImpl plain({{5, 6}, {5}}, two);
    Formula unit({{5, 6}, {5}}, two);
    fully_shard(unit, {.mesh = flat_mesh(world), .ignored_parameters = {unit.w[1]}});
    EXPECT_EQ(unit.w[1].sizes(), at::IntArrayRef({5}));
    EXPECT_TRUE(reshard_and_view(unit.w[1]).is_replicated());
    const at::Tensor x = fixed({4, 6}, world->rank());
    plain.forward(x).sum().backward();
    unit.forward(x).sum().backward();
    EXPECT_TRUE(at::equal(unit.w[1].grad(), plain.w[1].grad()));  // this rank's own, unreduced
    average(plain, *world);
    expect_close(unit.w[0].grad(), part_like(plain.w[0].grad(), unit.w[0]));
  });
}

TEST(FsdpReduction, ParametersUsedOnSomeRanksOnlyAreAnErrorWhereAskedFor) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    for (const auto& mesh : {flat_mesh(world), hybrid_mesh(world)}) {
      FullyShardOptions options{.mesh = mesh, .reshard_after_forward = true};
      options.unused_parameters = UnusedParameters::kError;
      bool use_second = true;
      Twins twins(
          {{5}, {6}},
          [&](const Weights& w, at::Tensor x) {
            const at::Tensor y = x * w[0].sum();
            return use_second ? y + w[1].sum() : y;
          },
          options);
      const auto backward = [&] { twins.unit.forward(fixed({2}, 1).requires_grad_()).sum().backward(); };
      backward();  // used on all ranks
      use_second = false;
      twins.unit.zero_grad();
      backward();  // used on none
      EXPECT_FALSE(twins.unit.w[1].grad().defined());
      use_second = world->rank() == 1 || world->rank() == 2;
      const std::string message = message_of(backward);
      contains(message, "parameter 'w1' got a gradient on rank(s) 1, 2 of its mesh but none on "
                        "rank(s) 0, 3");
      std::vector<std::string> messages = world->all_gather_strings(message);
      EXPECT_EQ(std::count(messages.begin(), messages.end(), message), 4);
      use_second = true;  // and the model goes on
      twins.unit.zero_grad();
      backward();
      EXPECT_TRUE(twins.unit.w[1].grad().defined());
    }
  });
}

TEST(FsdpReduction, WeightsThatBackwardDoesNotNeedAreNotGatheredForIt) {
  // The gradients of a table and of a sum do not depend on the weights; the sum's gradient is expanded, and autograd
  // allocates it with the parameter's layout.
  const Body table = [](const Weights& w, at::Tensor x) { return x + at::embedding(w[0], at::arange(4)); };
  const Body sum = [](const Weights& w, at::Tensor x) { return x + w[0].sum(0); };
  for (const bool listed : {false, true})  // explicit prefetch
    for (const Body& body : {table, sum})
      run_ranks(2, [&](const ProcessGroupPtr& world) {
        Chain plain(2), chain(2);
        for (Chain* each : {&plain, &chain}) each->units[0]->body = body;
        chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
        set_unshard_in_backward(*chain.units[0], false);
        if (listed) {
          torch::nn::Module* const first = chain.units[0].get();
          set_modules_to_backward_prefetch(*chain.units[1], {&first, 1});
        }
        for (int step = 0; step < 2; ++step) {
          plain.root.zero_grad();
          chain.root.zero_grad();
          plain.forward().backward();
          chain.backward(chain.forward());
          EXPECT_EQ(chain.gathers_and_post_backwards(), (Events{"unshard Formula", "unshard b", "post_backward b",
                                                                "post_backward a", "post_backward Formula"}));
          for (size_t i = 0; i < 2; ++i) {
            const at::Tensor& w = chain.units[i]->w[0];
            EXPECT_TRUE(at::equal(w.grad(), part_like(plain.units[i]->w[0].grad(), w))) << i;
          }
        }
      });
}

}  // namespace
}  // namespace megashard::testing
