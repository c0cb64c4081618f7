// Weights of a keep_adjacent list are adjacent in memory while their unit is unsharded.

#include "parallel/fsdp/adjacent_parameters.h"

#include <ATen/ops/cat.h>

#include "parallel/fsdp/detail/fsdp_param.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

/// Seen by a unit's body over 2 ranks: the weights are adjacent, and the joint matrix equals them.
struct Seen {
  bool adjacent = false, equal = false;
};

Seen seen_by(const ProcessGroupPtr& world, const Sizes& sizes, FullyShardOptions options, bool declared = true) {
  Seen seen;
  options.mesh = flat_mesh(world);
  Formula unit(sizes, [&](const Weights& w, at::Tensor x) {
    const auto whole = adjacent_matrix(w);
    seen.adjacent = whole.defined();
    seen.equal = seen.adjacent && at::equal(whole, at::cat(w));
    return at::linear(x, w[0]);
  });
  if (declared) keep_adjacent(unit.w);
  fully_shard(unit, options);
  unit.forward(fixed({3, sizes[0][1]}, 9)).sum().backward();
  EXPECT_FALSE(adjacent_matrix(unit.w).defined()) << "resharded";
  return seen;
}

TEST(AdjacentParameters, OneMatrixWhileTheirUnitIsGathered) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const Sizes sizes{{8, 16}, {4, 16}, {5, 16}};  // 5: uneven rows
    const MixedPrecisionPolicy in_bf16{.param_dtype = at::kBFloat16};
    for (const auto& options : {FullyShardOptions{}, {.mixed_precision = in_bf16}}) {
      const Seen seen = seen_by(world, sizes, options);
      EXPECT_TRUE(seen.adjacent && seen.equal);
    }
    const Seen large = seen_by(world, {{512, 128}, {1024, 128}}, {});  // gathered without a packed buffer
    EXPECT_TRUE(large.adjacent && large.equal);
  });
}

TEST(AdjacentParameters, NotWhereMemoryForbidsIt) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    EXPECT_FALSE(seen_by(world, {{8, 16}, {4, 16}}, {}, /*declared=*/false).adjacent);
    EXPECT_FALSE(seen_by(world, {{3, 5}, {4, 5}}, {}).adjacent) << "60 bytes are no multiple of 64";
  });
  run_ranks(1, [](const ProcessGroupPtr& world) {
    EXPECT_FALSE(seen_by(world, {{8, 16}, {4, 16}}, {}).adjacent) << "nothing is gathered";
  });
}

TEST(AdjacentParameters, OfTwoUnitsTheyLieApart) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Formula one({{8, 16}}, linear), other({{4, 16}}, linear);
    const Weights both{one.w[0], other.w[0]};
    keep_adjacent(both);
    for (auto* unit : {&one, &other}) {
      fully_shard(*unit, resharding(world));
      unshard(*unit);
    }
    EXPECT_FALSE(adjacent_matrix(both).defined());
  });
}

TEST(AdjacentParameters, ThoseOfOneUnitLieTogetherWithoutTheRest) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Formula one({{8, 16}, {4, 16}}, linear), other({{4, 16}}, linear);
    keep_adjacent(Weights{other.w[0], one.w[0], one.w[1]});
    for (auto* unit : {&one, &other}) {
      fully_shard(*unit, resharding(world));
      unshard(*unit);
    }
    const auto whole = adjacent_matrix(one.w);
    ASSERT_TRUE(whole.defined());
    EXPECT_TRUE(at::equal(whole, at::cat(one.w)));
    EXPECT_FALSE(adjacent_matrix(Weights{other.w[0], one.w[0]}).defined());
  });
}

TEST(AdjacentParameters, TheirMemoryGoesWithTheLastOfThem) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto body = [](const Weights& w, at::Tensor x) {
      const at::Tensor middle = at::linear(x, w[0]);
      // At this point of backward the second weight is freed, and the first one's bytes must still be there.
      middle.register_hook([w, kept = w[0].clone()](const at::Tensor&) {
        EXPECT_FALSE(find_fsdp_param(w[1])->unsharded().allocated());
        EXPECT_TRUE(at::equal(w[0], kept));
      });
      return at::linear(middle, w[1]);
    };
    Formula unit({{16, 16}, {16, 16}}, body);
    keep_adjacent(unit.w);
    fully_shard(unit, resharding(world));
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = fixed({3, 16}, 9).requires_grad_();
      unit.forward(x).sum().backward();
      for (const auto& w : unit.w) EXPECT_FALSE(find_fsdp_param(w)->unsharded().allocated());
    }
  });
}

TEST(AdjacentParameters, MatricesOfOneWidthOnly) {
  const Weights weights{fixed({8, 16}, 1), fixed({8, 15}, 2)};
  contains(message_of([&] { keep_adjacent(weights); }), "give matrices [out, in] of one width");
}

}  // namespace
}  // namespace megashard::testing
