#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "framework/training/optimizers/newton_schulz.h"
#include "framework/training/optimizers/optimizer.h"
#include "parallel/fsdp/fully_shard.h"
#include "tests/support/formula.h"
#include "tests/support/message_of.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

/// Seven rows, one row, rows that no world divides, a fused projection of two query groups (heads of 2 and 2 x 1
/// rows), and what AdamW steps.
struct Weights : torch::nn::Module {
  explicit Weights(at::ScalarType dtype = at::kFloat, uint64_t seed = 0) {
    for (const auto& [name, sizes] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
             {"wide", {7, 13}}, {"tall", {13, 3}}, {"one", {1, 6}}, {"embed", {9, 4}}, {"bias", {5}}, {"qkv", {8, 5}}})
      register_parameter(name, testing::fixed(sizes, ++seed).to(dtype));
  }
  at::Tensor forward(at::Tensor x) { return x; }
};

NamedTensors named(const torch::nn::Module& module) {
  NamedTensors found;
  for (const auto& item : module.named_parameters()) found.emplace_back(item.key(), item.value());
  return found;
}

OptimizerOptions options_of_test() {
  OptimizerOptions options{.kind = OptimizerKind::kMuon, .lr = 0.5, .weight_decay = 0.1};
  options.muon.use_nesterov = true;
  options.muon.is_embedding_or_output_parameter = [](const std::string& name) { return name == "embed"; };
  options.muon.qkv_split_shapes = [](const std::string& name, const std::vector<int64_t>&) {
    return name == "qkv" ? std::vector<int64_t>{2, 1, 1} : std::vector<int64_t>();
  };
  return options;
}

/// The same whole gradients for both, each rank its part.
void set_gradients(const NamedTensors& parameters, uint64_t seed) {
  for (const auto& [name, parameter] : parameters) {
    const auto whole = testing::fixed(reshard_and_view(parameter).global_sizes, ++seed).to(parameter.scalar_type());
    parameter.mutable_grad() = testing::part_like(whole, parameter).contiguous().to(parameter.device());
  }
}

/// Steps a whole and a sharded copy of the same weights three times; momenta, other states and weights agree.
void expect_as_whole(torch::nn::Module& whole, torch::nn::Module& sharded, double bar) {
  const auto wholes = named(whole), pieces = named(sharded);
  Optimizer on_whole(wholes, options_of_test()), on_pieces(pieces, options_of_test());
  for (uint64_t step = 1; step <= 3; ++step) {
    set_gradients(wholes, 100 * step);
    set_gradients(pieces, 100 * step);
    if (step == 2) {
      EXPECT_FLOAT_EQ(on_whole.clip_grad_norm(0.5).item<float>(), on_pieces.clip_grad_norm(0.5).item<float>());
    }
    on_whole.step();
    on_pieces.step();
  }
  const auto expect_near = [bar](const std::string& name, const at::Tensor& all, const at::Tensor& piece) {
    if (piece.numel() == 0) return;
    EXPECT_LE((all - piece).abs().max().item<double>(), bar) << name;
  };
  const auto expected = on_whole.sharded_state_dict(), state = on_pieces.sharded_state_dict();
  ASSERT_EQ(state.size(), expected.size());
  for (size_t i = 0; i < state.size(); ++i) {
    const auto& [key, piece] = state[i];
    ASSERT_EQ(key, expected[i].first);
    auto all = expected[i].second.local.detach();
    for (int64_t dim = 0; dim < all.dim(); ++dim)
      all = all.narrow(dim, piece.offsets[static_cast<size_t>(dim)], piece.local.size(dim));
    expect_near(key, all, piece.local.detach());
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto all = testing::part_like(wholes[i].second, pieces[i].second);
    expect_near(pieces[i].first, all.to(at::kFloat), reshard_and_view(pieces[i].second).local.detach().to(at::kFloat));
  }
}

constexpr double kBar = 2e-6;

TEST(MuonTest, MomentaAndUpdatesAreThoseOfTheWholeMatrix) {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    testing::run_ranks(world_size, [](const ProcessGroupPtr& world) {
      Weights whole;
      Hooked<Weights> sharded;
      fully_shard(sharded, testing::resharding(world));
      expect_as_whole(whole, sharded, kBar);
    });
  }
}

TEST(MuonTest, ShardsWithReplicasAreAsTheWholeMatrix) {
  testing::run_ranks(4, [](const ProcessGroupPtr& world) {
    FullyShardOptions options;
    options.mesh = std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"a", "b"});
    Weights whole;
    Hooked<Weights> replicated;
    fully_shard(replicated, options);
    expect_as_whole(whole, replicated, kBar);
  });
}

/// As experts: two ranks each have a unit that the two others have not, and all share another.
TEST(MuonTest, MeshesOfSomeRanksAreAsTheWholeMatrix) {
  struct Both : torch::nn::Module {
    Both(uint64_t seed) {
      shared = register_module("shared", std::make_shared<Hooked<Weights>>());
      own = register_module("own", std::make_shared<Hooked<Weights>>(at::kFloat, seed));
    }
    std::shared_ptr<Hooked<Weights>> shared, own;
  };
  testing::run_ranks(4, [](const ProcessGroupPtr& world) {
    const int part = world->rank() % 2;
    Both whole(40 * (part + 1)), sharded(40 * (part + 1));
    const auto some = world->subgroup({part, part + 2}, "part" + std::to_string(part));
    fully_shard(*sharded.shared, testing::resharding(world));
    fully_shard(*sharded.own, testing::resharding(some));
    const auto wholes = named(whole), pieces = named(sharded);
    Optimizer on_whole(wholes, options_of_test()), on_pieces(pieces, options_of_test());
    set_gradients(wholes, 7);
    set_gradients(pieces, 7);
    on_whole.step();
    on_pieces.step();
    for (size_t i = 0; i < pieces.size(); ++i) {
      const auto all = testing::part_like(wholes[i].second, pieces[i].second);
      EXPECT_TRUE(all.allclose(reshard_and_view(pieces[i].second).local, 0, kBar)) << pieces[i].first;
    }
  });
}

/// Experts: a stack is stepped as its matrices, whichever of them a rank has; a part of one is refused.
TEST(MuonTest, AStackIsItsMatricesOneByOne) {
  struct Stack : torch::nn::Module {
    explicit Stack(at::IntArrayRef sizes) { register_parameter("stack", testing::fixed(sizes, 5)); }
    at::Tensor forward(at::Tensor x) { return x; }
  };
  auto options = options_of_test();
  options.muon.is_stack_of_matrices = [](const std::string& name) { return name == "stack"; };
  testing::run_ranks(3, [&](const ProcessGroupPtr& world) {
    Hooked<Stack> sharded(at::IntArrayRef{3, 2, 4, 5});
    NamedTensors matrices;
    for (const auto& each : testing::fixed({3, 2, 4, 5}, 5).flatten(0, 1).unbind(0))
      matrices.emplace_back("matrix", each.clone().requires_grad_());
    fully_shard(sharded, testing::resharding(world));
    const auto pieces = named(sharded);
    const auto gradients = testing::fixed({3, 2, 4, 5}, 6);
    pieces[0].second.mutable_grad() = testing::part_like(gradients, pieces[0].second).contiguous();
    for (int64_t i = 0; i < 6; ++i)
      matrices[static_cast<size_t>(i)].second.mutable_grad() = gradients.flatten(0, 1).select(0, i);
    Optimizer on_stack(pieces, options), on_matrices(matrices, options);
    on_stack.step();
    on_matrices.step();
    const auto local = reshard_and_view(pieces[0].second).local.detach();
    for (int64_t half = 0; half < 2; ++half)
      EXPECT_TRUE(at::equal(local.select(0, 0).select(0, half),
                            matrices[static_cast<size_t>(2 * world->rank() + half)].second.detach()));
  });
  testing::run_ranks(4, [&](const ProcessGroupPtr& world) {
    Hooked<Stack> sharded(at::IntArrayRef{1, 2, 4, 5});
    auto of_leading = testing::resharding(world);
    of_leading.shard_placement_fn = [](const at::Tensor&) { return ShardPlacement{.leading_dims = 3}; };
    fully_shard(sharded, of_leading);
    const auto pieces = named(sharded);
    set_gradients(pieces, 7);
    Optimizer optimizer(pieces, options);
    EXPECT_THAT(testing::message_of([&] { optimizer.step(); }), ::testing::HasSubstr("expert_fully_shard_parallel"));
  });
}

TEST(MuonTest, BrainFloatsAreSteppedInFp32AsTheWholeMatrix) {
  testing::run_ranks(3, [](const ProcessGroupPtr& world) {
    Weights whole(at::kBFloat16);
    Hooked<Weights> sharded(at::kBFloat16);
    fully_shard(sharded, testing::resharding(world));
    // Of a weight of about 1, where fp32 copies on both sides of a tie are rounded to neighbours.
    expect_as_whole(whole, sharded, 1.0 / 128);
  });
}

TEST(MuonTest, TheRanksShareTheWork) {
  testing::run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<testing::CollectiveCall> calls;
    Hooked<Weights> sharded;
    FullyShardOptions options;
    options.mesh = testing::recording_mesh(world, {2}, {"shard"}, calls);
    fully_shard(sharded, options);
    const auto pieces = named(sharded);
    Optimizer optimizer(pieces, options_of_test());
    set_gradients(pieces, 1);
    calls.clear();
    optimizer.step();
    // Four matrices, two at a time; there and back.
    EXPECT_EQ(std::ranges::count(calls, "all_to_all", &testing::CollectiveCall::operation), 4);
    EXPECT_EQ(calls.size(), 4u);
  });
}

/// By singular values, in fp64: every one goes through the polynomials alone.
at::Tensor by_singular_values(const at::Tensor& matrix, const std::vector<std::array<double, 3>>& polynomials) {
  const auto [u, s, v] = at::linalg_svd(matrix.to(at::kDouble), /*full_matrices=*/false);
  at::Tensor x = s / s.norm();
  for (const auto& [a, b, c] : polynomials) x = x * a + x.pow(3) * b + x.pow(5) * c;
  return at::matmul(u * x, v);
}

TEST(MuonTest, NewtonSchulzTurnsSingularValuesAlone) {
  const std::vector<std::array<double, 3>> simple(5, {3.4445, -4.7750, 2.0315});
  const std::vector<std::array<double, 3>> quintic = {{4.0848, -6.8946, 2.9270},
                                                      {3.9505, -6.3029, 2.6377},
                                                      {3.7418, -5.5913, 2.3037},
                                                      {2.8769, -3.1427, 1.2046},
                                                      {2.8366, -3.0525, 1.2012}};
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{6, 6}, {4, 9}, {9, 4}}) {
    const auto matrix = testing::fixed(sizes, 3).cpu();
    NewtonSchulzOptions options{.scale_mode = MuonScaleMode::kSpectral, .extra_scale_factor = 0.2};
    const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(sizes[0], sizes[1])));
    // Five products of fp32 matrices, whose errors the polynomials multiply by up to 4 each.
    EXPECT_TRUE(
        orthogonalized(matrix, options).to(at::kDouble).allclose(by_singular_values(matrix, quintic) * scale, 0, 1e-5));
    options.coefficients = MuonCoefficients::kSimple;
    options.scale_mode = MuonScaleMode::kUnitRmsNorm;
    const double unit = 0.2 * std::sqrt(static_cast<double>(sizes[0]) / static_cast<double>(sizes[1]));
    EXPECT_TRUE(
        orthogonalized(matrix, options).to(at::kDouble).allclose(by_singular_values(matrix, simple) * unit, 0, 1e-5));
  }
}

TEST(MuonTest, AFusedProjectionIsSeveralMatrices) {
  const auto fused = testing::fixed({8, 5}, 11).cpu();  // of two groups: q q k v
  const auto all = orthogonalized(fused, {2, 1, 1}, {});
  const auto queries = at::cat({fused.narrow(0, 0, 2), fused.narrow(0, 4, 2)});
  const auto keys = at::stack({fused[2], fused[6]});
  const auto expected = orthogonalized(queries, {});
  EXPECT_TRUE(at::cat({all.narrow(0, 0, 2), all.narrow(0, 4, 2)}).equal(expected));
  EXPECT_TRUE(at::stack({all[2], all[6]}).equal(orthogonalized(keys, {})));
  EXPECT_FALSE(all.allclose(orthogonalized(fused, {})));
}

TEST(MuonTest, StepsThoseThatHaveGradientsNow) {
  Weights some, all;
  const auto few = named(some), many = named(all);
  Optimizer optimizer(few, options_of_test()), other(many, options_of_test());
  for (uint64_t step = 1; step <= 3; ++step) {
    set_gradients(few, step);
    set_gradients(many, step);
    if (step == 2) few[0].second.mutable_grad().reset();  // "wide"
    const at::Tensor before = few[0].second.detach().clone();
    optimizer.step();
    other.step();
    EXPECT_EQ(few[0].second.equal(before), step == 2);
    EXPECT_TRUE(few[1].second.equal(many[1].second));  // "tall" does not mind
  }
}

TEST(MuonTest, GoesOnFromItsStateToTheBit) {
  Weights first, second;
  const auto straight = named(first), resumed = named(second);
  Optimizer before(straight, options_of_test()), after(resumed, options_of_test());
  set_gradients(straight, 1);
  before.step();
  auto from = before.sharded_state_dict(), to = after.sharded_state_dict();
  const at::NoGradGuard no_grad;
  size_t momenta = 0;
  for (size_t i = 0; i < from.size(); ++i) {
    momenta += from[i].first.ends_with(".momentum_buffer");
    to[i].second.local.copy_(from[i].second.local);
  }
  EXPECT_EQ(momenta, 4u);  // AdamW has the embeddings and the bias
  EXPECT_EQ(from.size(), 4u + 2 * 3);
  for (size_t i = 0; i < straight.size(); ++i) resumed[i].second.copy_(straight[i].second);
  for (auto* each : {&straight, &resumed}) set_gradients(*each, 2);
  before.step();
  after.step();
  for (size_t i = 0; i < straight.size(); ++i) EXPECT_TRUE(straight[i].second.equal(resumed[i].second));
}

}  // namespace
}  // namespace megashard
