// Recompute and fully_shard together: a unit that recomputes, a recompute around a whole sharded
// model, and one around a list of units. Case 18 of docs/parameter_identity.md.

#include "framework/recompute/recompute.h"
#include "tests/support/formula.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

struct AroundImpl : torch::nn::Module {
  explicit AroundImpl(std::shared_ptr<Stack> given) : inner(register_module("inner", std::move(given))) {}
  at::Tensor forward(at::Tensor x) { return inner->forward(x * 2); }
  std::shared_ptr<Stack> inner;
};

enum class Place { kInUnits, kAroundRoot, kBoth };

struct RecomputeCase {
  Place place;
  bool use_reentrant;
  bool input_requires_grad;
};

class FsdpRecompute : public ::testing::TestWithParam<RecomputeCase> {};

TEST_P(FsdpRecompute, GradientsAreBitEqualToThoseOfThePlainModel) {
  const Place place = GetParam().place;
  const bool reentrant = GetParam().use_reentrant, with_grad = GetParam().input_requires_grad;
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    const auto plain_inner = std::make_shared<Stack>(3, 5, 7), inner = std::make_shared<Stack>(3, 5, 7);
    uint64_t seed = 1;
    for (auto& item : plain_inner->named_parameters()) item.value().set_data(fixed(item.value().sizes(), seed++) * 0.3);
    copy_weights(*plain_inner, *inner);
    AroundImpl plain(plain_inner);
    Hooked<AroundImpl> model(inner);
    const RecomputeOptions options{.use_reentrant = reentrant, .preserve_rng_state = false};
    if (place != Place::kAroundRoot) {
      for (auto& block : inner->blocks) recompute(*block, options);
    }
    if (place != Place::kInUnits) recompute(model, options);
    shard_stack(*inner, {.mesh = flat_mesh(world)});
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = fixed({4, 5}, 50 + step).requires_grad_(with_grad);
      const at::Tensor y = fixed({4, 5}, 50 + step).requires_grad_(with_grad);
      plain.zero_grad();
      model.zero_grad();
      if (reentrant && place != Place::kInUnits && with_grad) {
        y.register_hook([&](const at::Tensor&) {  // after the inner backward, within the outer one
          EXPECT_FALSE(inner->head->weight.grad().defined()) << "the inner backward ended the outer";
        });
      }
      const at::Tensor expected = plain.forward(x), output = model.forward(y);
      ASSERT_TRUE(at::equal(output, expected)) << "step " << step;
      expected.pow(2).sum().backward();
      output.pow(2).sum().backward();
      const auto reference = plain.named_parameters();
      for (const auto& item : model.named_parameters()) {
        ASSERT_TRUE(item.value().grad().defined()) << item.key();
        EXPECT_TRUE(at::equal(item.value().grad(), part_like(reference[item.key()].grad(), item.value())))
            << item.key();
        EXPECT_EQ(item.value().sizes(), reshard_and_view(item.value()).local.sizes());
      }
      if (with_grad) {
        EXPECT_TRUE(at::equal(y.grad(), x.grad()));
      }
      const c10::NoGradGuard no_grad;
      for (auto& w : plain.parameters()) w.mul_(0.5);
      for (auto& w : model.parameters()) w.mul_(0.5);
    }
  });
}

std::string name_of(const ::testing::TestParamInfo<RecomputeCase>& info) {
  static const std::vector<std::string> places = {"in_units", "around_root", "both"};
  return places[static_cast<size_t>(info.param.place)] + (info.param.use_reentrant ? "_reentrant" : "") +
         (info.param.input_requires_grad ? "" : "_input_without_grad");
}

INSTANTIATE_TEST_SUITE_P(
    All, FsdpRecompute,
    ::testing::Values(RecomputeCase{Place::kInUnits, false, true}, RecomputeCase{Place::kInUnits, true, true},
                      RecomputeCase{Place::kAroundRoot, false, true}, RecomputeCase{Place::kAroundRoot, true, true},
                      RecomputeCase{Place::kBoth, false, true}, RecomputeCase{Place::kBoth, true, true},
                      RecomputeCase{Place::kInUnits, false, false}, RecomputeCase{Place::kAroundRoot, true, false}),
    name_of);

/// The backward of the rest ends before that of the part begins, which needs the weight again.
TEST(FsdpReentrantRecompute, AReentrantPartMayShareAWeightWithTheRest) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Formula part({}, [](const Weights&, at::Tensor x) { return x; });
    Twins twins(
        {{5, 5}, {5, 5}},
        [](const Weights& w, at::Tensor x) {
          return at::linear(at::linear(at::tanh(at::linear(x, w[0])), w[1]), w[0]);
        },
        resharding(world));
    twins.unit.body = [&part](const Weights& w, at::Tensor x) {
      part.body = [&w](const Weights&, at::Tensor inner) { return at::tanh(at::linear(inner, w[0])); };
      return at::linear(at::linear(part.forward(x), w[1]), w[0]);
    };
    recompute(part, {.use_reentrant = true, .preserve_rng_state = false});
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = fixed({4, 5}, 50 + step).requires_grad_();
      twins.plain.forward(x).sum().backward();
      twins.unit.forward(x).sum().backward();
      twins.expect_equal_gradients();
      twins.expect_sharded();
      twins.zero_grad();
    }
  });
}

}  // namespace
}  // namespace megashard::testing
