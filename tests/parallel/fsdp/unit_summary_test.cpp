#include "parallel/fsdp/unit_summary.h"

#include "tests/support/chain.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

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
