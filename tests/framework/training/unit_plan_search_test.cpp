#include "framework/training/unit_plan_search.h"

#include <gtest/gtest.h>

#include <string>

#include "framework/modules/wrap_policy.h"

namespace megashard::testing {
namespace {

using Kind = UnitTrace::Event::Kind;

/// Layers of `bytes`, each gathered, computed with for `compute` seconds, and in backward for twice as long.
StepTrace trace_of(size_t layers, int64_t bytes, double compute, double gather) {
  StepTrace trace;
  trace.units.push_back({.modules = {""}, .gathered_bytes = 0, .reduced_bytes = 0, .parts = {}});
  for (size_t i = 0; i < layers; ++i) {
    const std::string path = "layers." + std::to_string(i);
    trace.units.push_back({.modules = {path},
                           .gathered_bytes = bytes,
                           .reduced_bytes = bytes,
                           .parts = {{path + ".attention", bytes / 2, bytes / 2, compute / 4},
                                     {path + ".mlp", bytes / 2, bytes / 2, compute * 3 / 4}}});
  }
  for (size_t i = 1; i <= layers; ++i) {
    trace.events.push_back({Kind::kGather, i, false, gather});
    trace.events.push_back({Kind::kCompute, i, false, compute});
    trace.events.push_back({Kind::kReshard, i, false, 0});
  }
  for (size_t i = layers; i >= 1; --i) {
    trace.events.push_back({Kind::kGather, i, true, gather});
    trace.events.push_back({Kind::kCompute, i, true, 2 * compute});
    trace.events.push_back({Kind::kReduce, i, true, gather});
  }
  return trace;
}

UnitPlan layers_alone(size_t layers) {
  UnitPlan plan;
  for (size_t i = 0; i < layers; ++i) plan.units.push_back({"layers." + std::to_string(i)});
  return plan;
}

constexpr LinkCosts kLink{.gather_latency = 1, .gather_bandwidth = 100, .reduce_latency = 1, .reduce_bandwidth = 100};

TEST(UnitPlanSearch, LinksAreWhatExplainsTheTrace) {
  const auto link = link_costs(trace_of(4, 100, 1, /*gather=*/3), /*gather_latency=*/1, /*reduce_latency=*/0.5);
  EXPECT_DOUBLE_EQ(link.gather_bandwidth, 50);
  EXPECT_DOUBLE_EQ(link.reduce_bandwidth, 40);
}

// By hand, for two layers of 100 bytes: a gather or a reduction takes 2, compute 10 and 20.
TEST(UnitPlanSearch, ForecastsOverlapComputeAndOneTransfer) {
  const StepTrace trace = trace_of(2, 100, 10, 2);
  UnitPlan plan = layers_alone(2);
  // gather 2, compute 10, gather 2, compute 10; backward: gather 2, compute 20 (next gather beside it), reduce beside
  // the next compute of 20, the last reduction alone.
  const auto plain = forecast_plan(trace, kLink, plan, /*host_runs_ahead=*/false);
  EXPECT_DOUBLE_EQ(plain.seconds, 2 + 10 + 2 + 10 + 2 + 20 + 20 + 2);
  EXPECT_DOUBLE_EQ(plain.exposed, 8);
  EXPECT_EQ(plain.gathered_peak, 200);
  plan.forward_prefetch = 1;
  EXPECT_DOUBLE_EQ(forecast_plan(trace, kLink, plan, false).seconds, plain.seconds - 2);
  plan.forward_prefetch = 0;
  EXPECT_DOUBLE_EQ(forecast_plan(trace, kLink, plan, /*host_runs_ahead=*/true).seconds, plain.seconds - 2);

  // One gather of 200 bytes takes 3: before forward, before backward, and the reduction behind it.
  const UnitPlan both{.units = {{"layers.0", "layers.1"}}};
  const auto merged = forecast_plan(trace, kLink, both, false);
  EXPECT_DOUBLE_EQ(merged.seconds, 3 + 20 + 3 + 40 + 3);
  EXPECT_EQ(merged.gathered_peak, 200);
}

TEST(UnitPlanSearch, PartsComputeForTheirSharesOfTheUnit) {
  UnitPlan plan{.units = {{"layers.0"}, {"layers.0.attention"}, {"layers.0.mlp"}}};
  const auto split = forecast_plan(trace_of(1, 100, 8, 2), kLink, plan, false);
  // gathers of 1 (nothing is left to the layer), 1.5 and 1.5 with compute of 2 and 6; backward gathers 1, 1.5, computes
  // 12 while attention is gathered and then 4, reduces mlp beside it, then attention and what is left.
  EXPECT_DOUBLE_EQ(split.seconds, 1 + 1.5 + 2 + 1.5 + 6 + 1 + 1.5 + 12 + 4 + 1.5 + 1);
  EXPECT_EQ(split.gathered_peak, 100);
}

TEST(UnitPlanSearch, LatencyMergesAndMemoryHoldsItBack) {
  const StepTrace slow_start = trace_of(8, 10, 0.5, 1.1);
  const UnitPlan present = layers_alone(8);
  const auto look = [&](const UnitPlan& plan) { return forecast_plan(slow_start, kLink, plan, false); };
  const UnitPlan free = search_plan(slow_start, kLink, present, /*more_bytes=*/1000, false);
  EXPECT_EQ(free.units[0], (UnitPlan::Unit{"layers.0", "layers.1", "layers.2"}));
  EXPECT_LT(look(free).seconds, 0.8 * look(present).seconds);
  const UnitPlan held = search_plan(slow_start, kLink, present, /*more_bytes=*/30, false);
  EXPECT_EQ(held.units[0], (UnitPlan::Unit{"layers.0", "layers.1"}));
  EXPECT_LE(look(held).gathered_peak, look(present).gathered_peak + 30);
}

TEST(UnitPlanSearch, WhatGainsNothingStays) {
  const UnitPlan present = layers_alone(4);
  EXPECT_EQ(search_plan(trace_of(4, 1, 1000, 0.02), {0.01, 100, 0.01, 100}, present, 1000, true), present);
}

TEST(UnitPlanSearch, ListsThatFollowEachOtherAreNotMerged) {
  StepTrace trace = trace_of(4, 10, 0.5, 1.1);
  for (size_t i = 1; i <= 2; ++i) trace.units[i].modules[0] = "blocks." + std::to_string(i);
  const UnitPlan present{.units = {{"blocks.1"}, {"blocks.2"}, {"layers.2"}, {"layers.3"}}};
  EXPECT_EQ(search_plan(trace, kLink, present, 1000, false).units,
            (std::vector<UnitPlan::Unit>{{"blocks.1", "blocks.2"}, {"layers.2", "layers.3"}}));
}

TEST(UnitPlanFile, WhatIsWrittenIsReadAsTheSamePlan) {
  const UnitPlan plan{.units = {{"model.layers.0", "model.layers.1"}, {"model.layers.2"}},
                      .forward_prefetch = 1,
                      .backward_prefetch = 2};
  EXPECT_EQ(parse_unit_plan(unit_plan_text(plan), "plan.yaml"), plan);
}

}  // namespace
}  // namespace megashard::testing
