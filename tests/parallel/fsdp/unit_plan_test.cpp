// Units that are merged, split and created between steps: results stay the same.

#include "parallel/fsdp/unit_plan.h"

#include <gmock/gmock.h>

#include "parallel/fsdp/fsdp_controls.h"
#include "parallel/fsdp/unit_trace.h"
#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A step of the sharded chain is bit-identical to one of the plain chain.
void expect_equal_step(Chain& plain, Chain& chain, uint64_t step, ProcessGroup& world) {
  plain.root.zero_grad();
  chain.root.zero_grad();
  const at::Tensor loss = chain.forward(data_seed(step, world)), expected = plain.forward(data_seed(step, world));
  ASSERT_TRUE(at::equal(loss, expected));
  expected.backward();
  chain.backward(loss);
  average_gradients(plain.root, world);
  expect_gradients_of(plain.root, chain.root);
  expect_sharded(chain.root);
  descend(plain.root);
  descend(chain.root);
}

TEST(UnitPlans, AnyGroupingTakesThePlainSteps) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world)});
    const UnitPlan first = unit_plan_of(chain.root);
    EXPECT_EQ(first, (UnitPlan{.units = {{"a"}, {"b"}, {"c"}}}));
    const UnitPlan plans[] = {{.units = {{"a", "b"}, {"c"}}, .forward_prefetch = 1},
                              {.units = {{"a", "b", "c"}}},
                              {.units = {{"b"}}, .backward_prefetch = 2},
                              {.units = {}},
                              first};
    uint64_t step = 0;
    expect_equal_step(plain, chain, step++, *world);
    for (const auto& plan : plans) {
      apply_unit_plan(chain.root, plan);
      EXPECT_EQ(unit_plan_of(chain.root).units, plan.units);
      expect_equal_step(plain, chain, step++, *world);
      expect_equal_step(plain, chain, step++, *world);
    }
  });
}

TEST(UnitPlans, BeforeTheFirstStep) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain plain, chain;
    chain.shard({.mesh = flat_mesh(world)});
    apply_unit_plan(chain.root, {.units = {{"a", "b"}, {"c"}}});
    expect_equal_step(plain, chain, 0, *world);
    expect_equal_step(plain, chain, 1, *world);
  });
}

TEST(UnitPlans, MergedUnitsAreGatheredAndReducedAsOne) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    chain.backward(chain.forward());
    apply_unit_plan(chain.root, {.units = {{"a", "b"}, {"c"}}, .forward_prefetch = 1});
    const at::Tensor loss = chain.forward();
    EXPECT_EQ(chain.events, (Events{"unshard Formula", "unshard a", "unshard c", "reshard a", "reshard c"}));
    chain.backward(loss);
    EXPECT_THAT(chain.events,
                ElementsAre("pre_backward Formula", "unshard c", "pre_backward c", "unshard a", "post_backward c",
                            "reshard c", "reduce c", "pre_backward a", "post_backward a", "reshard a", "reduce a",
                            "post_backward Formula", "reshard Formula", "reduce Formula"));
  });
}

/// The root calls a module that contains two others, like a decoder layer.
struct Nested {
  Nested() : root({{6, 6}}, linear), layer(std::make_shared<Formula>(Sizes{{6, 6}}, linear, at::kFloat, 20)) {
    for (const uint64_t seed : {30, 40}) {
      parts.push_back(std::make_shared<Formula>(
          Sizes{{6, 6}, {6}}, [](const Weights& w, at::Tensor x) { return at::linear(x, w[0], w[1]); }, at::kFloat,
          seed));
      layer->register_module("part" + std::to_string(parts.size()), parts.back());
    }
    root.register_module("layer", layer);
    layer->body = [this](const Weights& w, at::Tensor x) {
      return at::linear(parts[1]->forward(parts[0]->forward(x)), w[0]) + x;
    };
    root.body = [this](const Weights& w, at::Tensor x) { return at::linear(layer->forward(x), w[0]); };
  }
  Nested(const Nested&) = delete;

  Formula root;
  std::shared_ptr<Formula> layer;
  std::vector<std::shared_ptr<Formula>> parts;
};

TEST(UnitPlans, AUnitThatIsSplitGoesOnCastingAtItsOwnEdges) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const FullyShardOptions options{
        .mesh = flat_mesh(world),
        .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = at::kFloat}};
    Nested whole, split, merged;
    for (auto* model : {&whole, &split, &merged}) {
      fully_shard(*model->layer, options);
      fully_shard(model->root, {.mesh = options.mesh});
    }
    const auto step = [](Nested& model, uint64_t seed) {
      model.root.zero_grad();
      const at::Tensor loss = model.root.forward(fixed({4, 6}, seed)).sum();
      loss.backward();
      return loss;
    };
    ASSERT_TRUE(at::equal(step(whole, 1), step(split, 1)));
    apply_unit_plan(split.root, {.units = {{"layer"}, {"layer.part1"}, {"layer.part2"}}});
    apply_unit_plan(merged.root, {.units = {}});  // the layer casts as before but has no parameters
    for (const uint64_t seed : {2, 3}) {
      const at::Tensor expected = step(whole, seed);
      EXPECT_TRUE(at::equal(step(split, seed), expected));
      EXPECT_TRUE(at::equal(step(merged, seed), expected));
      const auto grads = whole.root.named_parameters();
      for (const auto* model : {&split, &merged}) {
        for (const auto& item : model->root.named_parameters())
          EXPECT_TRUE(at::equal(item.value().grad(), grads[item.key()].grad())) << item.key();
      }
    }
    apply_unit_plan(split.root, {.units = {{"layer"}}});
    EXPECT_TRUE(at::equal(step(split, 4), step(whole, 4)));
  });
}

TEST(UnitPlans, WhatCannotBeAPlanChangesNothing) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.root.register_module("again", chain.units[0]);  // tied
    chain.shard({.mesh = flat_mesh(world)});
    const auto refused = [&](UnitPlan plan) { return message_of([&] { apply_unit_plan(chain.root, plan); }); };
    EXPECT_THAT(refused({.units = {{"a", "x"}}}), HasSubstr("names 'x', and the model has no such module"));
    EXPECT_THAT(refused({.units = {{"a"}, {"b", "a"}}}), HasSubstr("names 'a' twice"));
    EXPECT_THAT(refused({.units = {{}}}), HasSubstr("has no modules"));
    set_requires_gradient_sync(chain.root, false);
    chain.backward(chain.forward());
    EXPECT_THAT(refused({.units = {}}), HasSubstr("wait for their reduction"));
    clear_pending_gradients(chain.root);
    EXPECT_EQ(unit_plan_of(chain.root).units.size(), 3);
  });
}

TEST(UnitPlans, ATracedStepTellsWhatUnitsDo) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Nested model;
    const FullyShardOptions options{.mesh = flat_mesh(world)};
    fully_shard(*model.layer, options);
    fully_shard(model.root, options);
    const auto step = [&] { model.root.forward(fixed({4, 6}, 1).requires_grad_()).sum().backward(); };
    step();
    using Kind = UnitTrace::Event::Kind;
    std::vector<std::pair<Kind, size_t>> seen;
    {
      UnitTrace trace(model.root);
      ASSERT_EQ(trace.units().size(), 2);
      EXPECT_EQ(trace.units()[1].modules, (std::vector<std::string>{"layer"}));
      EXPECT_EQ(trace.units()[1].gathered_bytes, 4 * (3 * 36 + 2 * 6));
      step();
      for (const auto& event : trace.take_events()) seen.emplace_back(event.kind, event.unit);
      const auto& parts = trace.units()[1].parts;
      ASSERT_EQ(parts.size(), 2);
      EXPECT_EQ(parts[1].path, "layer.part2");
      EXPECT_EQ(parts[1].gathered_bytes, 4 * (36 + 6));
      EXPECT_GT(parts[1].forward_seconds, 0);
    }
    using enum Kind;
    const decltype(seen) expected = {{kGather, 0},  {kCompute, 1}, {kGather, 1}, {kCompute, 1},
                                     {kReshard, 1}, {kCompute, 1}, {kGather, 1}, {kCompute, 1},
                                     {kReduce, 1},  {kCompute, 0}, {kReduce, 0}};
    EXPECT_EQ(seen, expected);
    EXPECT_EQ(model.parts[0]->forward_hooks(), nullptr);
    step();
  });
}

}  // namespace
}  // namespace megashard::testing
