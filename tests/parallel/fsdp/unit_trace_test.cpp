// Readable trace of a run under fully_shard: ScheduleTrace.
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "parallel/fsdp/unit_summary.h"
#include "parallel/fsdp/unit_trace.h"
#include "tests/support/chain.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

Events as_events(const ScheduleTrace& trace) {
  Events events;
  for (const auto& event : trace.events()) events.push_back(event.what + " " + event.group);
  return events;
}

/// Upstream logs a line per phase with the module's path; here each phase is an event with it.
TEST(FullyShardLogging, test_fsdp_logging) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    ScheduleTrace trace(chain.root);
    const at::Tensor loss = chain.forward();
    EXPECT_EQ(as_events(trace), (Events{"unshard Formula", "unshard a", "reshard a", "unshard b", "reshard b",
                                        "unshard c", "reshard c"}));
    trace.clear();
    loss.backward();
    const Events backward = as_events(trace);
    for (const std::string unit : {"Formula", "a", "b", "c"}) {
      for (const std::string phase : {"pre_backward ", "post_backward ", "reshard ", "reduce "})
        EXPECT_EQ(std::count(backward.begin(), backward.end(), phase + unit), 1) << phase << unit;
    }
  });
}

TEST(ScheduleTrace, HearsWhatTheObserverHears) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world)});
    const at::Tensor first = chain.forward();
    Events expected = chain.events;
    chain.backward(first);
    expected.insert(expected.end(), chain.events.begin(), chain.events.end());
    {
      const ScheduleTrace trace(chain.root);
      chain.forward().backward();
      EXPECT_EQ(as_events(trace), expected);
      double last = 0;
      for (const auto& event : trace.events()) {
        EXPECT_GE(event.microseconds, last);
        last = event.microseconds;
      }
    }
    chain.forward().backward();  // no observer, no dangling pointer
    EXPECT_TRUE(chain.events.empty());
  });
}

TEST(ScheduleTrace, ChromesBarsOpenAndClose) {
  const auto folder = std::filesystem::path(::testing::TempDir());
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    Chain chain;
    chain.shard({.mesh = flat_mesh(world), .reshard_after_forward = true});
    ScheduleTrace trace(chain.root);
    for (int step = 0; step < 2; ++step) chain.forward().backward();
    const auto path = folder / c10::str("schedule_trace_", world->rank(), ".json");
    trace.write_chrome_trace(path, world->rank());

    std::ifstream file(path);
    const auto written = nlohmann::json::parse(file);
    std::map<std::string, int> open, bars, marks;
    for (const auto& event : written.at("traceEvents")) {
      EXPECT_EQ(event.at("pid"), world->rank());
      const std::string phase = event.at("ph");
      if (phase == "M") continue;
      const std::string name = event.at("name");
      EXPECT_GE(event.at("ts").get<double>(), 0);
      if (phase == "i") {
        ++marks[name];
        continue;
      }
      EXPECT_EQ(event.at("id"), name);
      open[name] += phase == "b" ? 1 : -1;
      bars[name] += phase == "b" ? 1 : 0;
      EXPECT_TRUE(open[name] == 0 || open[name] == 1) << name;
    }
    for (const std::string unit : {"Formula", "a", "b", "c"}) {
      EXPECT_EQ(open[unit], 0) << unit;
      EXPECT_EQ(bars[unit], 4) << unit;  // two steps, forward and backward
      EXPECT_EQ(marks["reduce " + unit], 2) << unit;
    }
    std::filesystem::remove(path);
    contains(message_of([&] { trace.write_chrome_trace(folder / "absent" / "x.json", 0); }), "could not be written");
  });
}

TEST(UnitSummary, HasTheBytesOfARankWithPadding) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Chain chain;  // weights of 6 x 6: 2 rows per rank; two ranks have only padding
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.param_dtype = at::kBFloat16;
    chain.shard(options);
    std::vector<torch::nn::Module*> next = {chain.units[1].get(), chain.units[2].get()};
    set_modules_to_forward_prefetch(*chain.units[0], next);
    chain.backward(chain.forward());
    const auto units = unit_summaries(chain.root);
    ASSERT_EQ(units.size(), 4U);
    EXPECT_EQ(units[0].module, "");
    EXPECT_EQ(units[1].module, "a");
    for (const auto& unit : units) {
      EXPECT_EQ(unit.parameters, 36);
      EXPECT_EQ(unit.ranks, 4);
      EXPECT_EQ(unit.sharded_bytes, 2 * 6 * 4);
      EXPECT_EQ(unit.gathered_bytes, 36 * 2);
      EXPECT_EQ(unit.stored, at::kFloat);
      EXPECT_EQ(unit.computed_in, at::kBFloat16);
    }
    EXPECT_EQ(units[1].forward_prefetch, (std::vector<std::string>{"b", "c"}));
    EXPECT_TRUE(units[2].forward_prefetch.empty());
  });
}

}  // namespace

}  // namespace megashard::testing
