// Ranks that gather or reduce different units get an error that says where they diverge, over Gloo.

#include "parallel/fsdp/collective_order.h"

#include <gmock/gmock.h>

#include "tests/support/chain.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A root over units a, b, c, ... with inner widths `inner`, each from and to `kWidth`; rank 1 runs the units in
/// `of_rank_1`, all others all but the last.
struct Parting {
  static constexpr int64_t kWidth = 6;

  Parting(const ProcessGroupPtr& world, const std::vector<int64_t>& inner, const std::vector<size_t>& of_rank_1)
      : root({{kWidth, kWidth}}, linear) {
    for (size_t i = 0; i < inner.size(); ++i) {
      const auto body = [](const Weights& w, at::Tensor x) { return at::linear(at::linear(x, w[0]), w[1]); };
      units.push_back(std::make_shared<Formula>(Sizes{{inner[i], kWidth}, {kWidth, inner[i]}}, body));
      root.register_module(std::string(1, static_cast<char>('a' + i)), units.back());
      fully_shard(*units.back(), {.mesh = flat_mesh(world), .reshard_after_forward = true});
    }
    fully_shard(root, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    std::vector<size_t> used(inner.size() - 1);
    for (size_t i = 0; i < used.size(); ++i) used[i] = i;
    if (world->rank() == 1 && !of_rank_1.empty()) used = of_rank_1;
    root.body = [this, used](const Weights& w, at::Tensor x) {
      for (const size_t i : used) x = units[i]->forward(x);
      return at::linear(x, w[0]);
    };
  }
  void step() { root.forward(fixed({4, kWidth}, 1).requires_grad_()).sum().backward(); }

  Formula root;
  std::vector<std::shared_ptr<Formula>> units;
};

/// Error of the second step on each rank; if its collectives fail, why_it_failed().
std::vector<std::string> told(const std::vector<int64_t>& inner, const std::vector<size_t>& of_rank_1) {
  std::vector<std::string> texts(3);
  run_ranks(
      3,
      [&](const ProcessGroupPtr& world) {
        Parting together(world, inner, {});
        CollectiveOrder order_of_others(together.root, world);
        for (int64_t step = 1; step <= 3; ++step) {
          order_of_others.begin_step(step);
          together.step();
          order_of_others.end_step();
        }
        Parting model(world, inner, of_rank_1);
        CollectiveOrder order(model.root, world);
        order.begin_step(7);
        std::string& text = texts[static_cast<size_t>(world->rank())];
        try {
          model.step();
        } catch (const std::exception&) {
          text = order.why_it_failed();
          return;
        }
        text = message_of([&] { order.end_step(); });
      },
      std::chrono::seconds(10));
  return texts;
}

TEST(CollectiveOrder, OtherUnitsOfTheSameSizeAreTold) {
  for (const auto& text : told({8, 8, 8}, {0, 2})) {
    EXPECT_THAT(text, AllOf(HasSubstr("the ranks part in step 7: as collective 3 of the step, rank 0 gathers b, and "
                                      "rank 1 gathers c; all ranks must run the same modules in the same order"),
                            HasSubstr("look for a branch in forward")));
  }
}

/// Collectives do not match: ranks fail, or wait until the deadline.
TEST(CollectiveOrder, UnitsOfOtherSizesAndUnitsThatAreLeftOutAreTold) {
  MEGASHARD_NOT_ON_SIM("it compares collectives as they begin, and names their units");
  for (const auto& [inner, of_rank_1] :
       {std::pair<std::vector<int64_t>, std::vector<size_t>>{{8, 8, 40}, {0, 2}}, {{8, 40, 8}, {0}}}) {
    size_t count = 0;
    for (const auto& text : told(inner, of_rank_1)) {
      if (text.empty()) continue;  // another rank's end reached this rank first
      EXPECT_THAT(text,
                  AllOf(HasSubstr("the ranks part in step 7: as collective 3 of the step"), HasSubstr("gathers b")));
      ++count;
    }
    EXPECT_GT(count, 0U);
  }
}

/// As for experts that are distributed over ranks.
TEST(CollectiveOrder, UnitsOfOtherNamesInTheSamePlacesAreTheSame) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto unit = std::make_shared<Formula>(Sizes{{6, 6}}, linear);
    Formula root({{6, 6}}, [&](const Weights& w, at::Tensor x) { return at::linear(unit->forward(x), w[0]); });
    root.register_module("expert_" + std::to_string(world->rank()), unit);
    fully_shard(*unit, {.mesh = flat_mesh(world)});
    fully_shard(root, {.mesh = flat_mesh(world)});
    CollectiveOrder order(root, world);
    order.begin_step(1);
    root.forward(fixed({4, 6}, 1)).sum().backward();
    order.end_step();
  });
}

}  // namespace
}  // namespace megashard::testing
