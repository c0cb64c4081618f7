#include "parallel/fsdp/grad_norm.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <limits>

#include "parallel/fsdp/fully_shard.h"
#include "parallel/tensor_parallel_layout.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<at::Tensor> with_gradients(at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> parameters;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{33, 7}, {5}, {0, 4}, {2, 3, 11}}) {
    const auto values = at::arange(1, c10::multiply_integers(sizes) + 1, at::kFloat).sin() * 3;
    auto parameter = at::zeros(sizes, at::dtype(dtype)).requires_grad_();
    parameter.mutable_grad() = values.view(sizes).to(dtype);
    parameters.push_back(parameter);
  }
  parameters.push_back(at::zeros({4}).requires_grad_());  // unused: no gradient
  return parameters;
}

at::Tensor all_gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> flat;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) flat.push_back(parameter.grad().reshape(-1).to(at::kDouble));
  }
  return at::cat(flat);
}

TEST(GradNormTest, EqualsTheNormOfOneVector) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const auto parameters = with_gradients(dtype);
    for (const double norm_type : {1.0, 2.0, 3.0, kInf}) {
      const double expected = all_gradients(parameters).norm(norm_type).item<double>();
      const auto norm = total_grad_norm(parameters, norm_type);
      EXPECT_EQ(norm.scalar_type(), at::kFloat);
      EXPECT_EQ(norm.dim(), 0);
      EXPECT_NEAR(norm.item<double>(), expected, 1e-6 * expected) << dtype << " norm " << norm_type;
    }
  }
}

TEST(GradNormTest, ClipsAsTorchDoes) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    // Half a unit in the last place of the largest value, and a little for the order of the sum.
    const double tolerance = dtype == at::kFloat ? 1e-6 : 1e-14;
    for (const double norm_type : {1.0, 2.0, 3.0}) {
      for (const double max_norm : {0.25, 1e6}) {
        const auto ours = with_gradients(dtype), theirs = with_gradients(dtype);
        const double norm = clip_grad_norm_(ours, max_norm, norm_type).item<double>();
        const double expected = torch::nn::utils::clip_grad_norm_(theirs, max_norm, norm_type);
        EXPECT_NEAR(norm, expected, 1e-5 * expected);
        const auto ours_clipped = all_gradients(ours), theirs_clipped = all_gradients(theirs);
        EXPECT_LT((ours_clipped - theirs_clipped).abs().max().item<double>(), tolerance) << dtype;
        if (max_norm > norm) {
          EXPECT_TRUE(ours_clipped.equal(all_gradients(with_gradients(dtype))));
        }
      }
    }
  }
}

// Parameters of sizes that do not divide evenly over ranks, each a unit with its own mesh.
struct Rows : torch::nn::Module {
  explicit Rows(std::vector<std::vector<int64_t>> sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      register_parameter("w" + std::to_string(i), at::zeros(sizes[i]));
    }
  }
  at::Tensor forward(at::Tensor x) { return x; }
};

at::Tensor whole_gradient(const std::vector<int64_t>& sizes) {
  return (at::arange(1, c10::multiply_integers(sizes) + 1, at::kFloat) * 0.7).sin().view(sizes);
}

/// Assigns every parameter its rows of a gradient that is the same in every world; returns the whole gradients,
/// concatenated.
at::Tensor give_gradients(torch::nn::Module& module) {
  std::vector<at::Tensor> flat;
  for (const auto& parameter : module.parameters()) {
    const auto view = reshard_and_view(parameter);
    const auto whole = whole_gradient(view.global_sizes);
    parameter.mutable_grad() = whole.narrow(0, view.offsets[0], view.local.size(0)).clone();
    flat.push_back(whole.reshape(-1));
  }
  return at::cat(flat).to(at::kDouble);
}

FullyShardOptions on(DeviceMeshPtr mesh) {
  FullyShardOptions options;
  options.mesh = std::move(mesh);
  return options;
}

struct Layout {
  std::vector<int> mesh;
  std::vector<std::string> names;
};

class ShardedGradNorm : public ::testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(Meshes, ShardedGradNorm,
                         ::testing::Values(Layout{{1}, {}}, Layout{{2}, {}}, Layout{{3}, {}}, Layout{{4}, {}},
                                           Layout{{2, 2}, {"replicate", "shard"}}));

TEST_P(ShardedGradNorm, IsTheNormOfTheWholeAndCostsOneAllReduce) {
  const auto& [shape, names] = GetParam();
  const int world_size = shape[0] * (shape.size() == 2 ? shape[1] : 1);
  testing::run_ranks(world_size, [&](const ProcessGroupPtr& world) {
    std::vector<testing::CollectiveCall> calls;
    const auto mesh = testing::recording_mesh(world, shape, names, calls);
    Hooked<Rows> module(std::vector<std::vector<int64_t>>{{5, 3}, {7}, {2, 2, 3}, {1, 4}});
    fully_shard(module, on(mesh));
    for (const double norm_type : {1.0, 2.0, 3.0, kInf}) {
      const auto whole = give_gradients(module);
      const double expected = whole.norm(norm_type).item<double>();
      calls.clear();
      const double norm = clip_grad_norm_(module.parameters(), 0.5, norm_type).item<double>();
      EXPECT_NEAR(norm, expected, 1e-6 * expected);
      EXPECT_EQ(calls.size(), shape.back() > 1 ? 1u : 0u);
      EXPECT_NEAR(total_grad_norm(module.parameters(), norm_type).item<double>(), 0.5, 1e-5);
    }
  });
}

TEST(GradNormTest, ParametersOnSeveralMeshes) {
  testing::run_ranks(4, [&](const ProcessGroupPtr& world) {
    std::vector<testing::CollectiveCall> calls;
    const auto all = testing::recording_mesh(world, {4}, {}, calls);
    const auto pairs = testing::recording_mesh(world, {2, 2}, {"replicate", "shard"}, calls);
    Hooked<Rows> wide(std::vector<std::vector<int64_t>>{{5, 3}, {9}});
    Hooked<Rows> narrow(std::vector<std::vector<int64_t>>{{3, 3}});
    Hooked<Rows> plain(std::vector<std::vector<int64_t>>{{4}});
    fully_shard(wide, on(all));
    fully_shard(narrow, on(pairs));
    std::vector<at::Tensor> parameters, wholes;
    for (Rows* module : std::initializer_list<Rows*>{&wide, &narrow, &plain}) {
      wholes.push_back(give_gradients(*module));
      for (const auto& parameter : module->parameters()) parameters.push_back(parameter);
    }
    // A rank that did not use a parameter still takes part in the reduction.
    if (world->rank() == 3) narrow.parameters()[0].mutable_grad().reset();
    calls.clear();
    const double norm = total_grad_norm(parameters).item<double>();
    EXPECT_EQ(calls.size(), 2u);
    if (world->rank() < 2) {
      const double expected = at::cat(wholes).norm().item<double>();
      EXPECT_NEAR(norm, expected, 1e-6 * expected);
    }
  });
}

TEST(GradNormTest, PartsOfSeveralRanks) {
  testing::run_ranks(4, [&](const ProcessGroupPtr& world) {  // ranks 0 and 2 share a part
    const DeviceMesh grid(world, {2, 2}, {"shard", "part"});
    std::vector<testing::CollectiveCall> calls;
    Hooked<Rows> part(std::vector<std::vector<int64_t>>{{5, 3}, {2}});
    Hooked<Rows> common(std::vector<std::vector<int64_t>>{{9}});
    const auto parts = grid.submesh({"part"});
    for (const auto& parameter : part.parameters()) set_tensor_parallel(parameter, parts, Placement::shard(0));
    fully_shard(part, on(grid.submesh({"shard"})));
    fully_shard(common, on(testing::recording_mesh(world, {4}, {}, calls)));
    const auto of_part = give_gradients(part), of_all = give_gradients(common);
    auto parameters = part.parameters();
    parameters.push_back(common.parameters()[0]);
    const at::NoGradGuard no_grad;
    for (const auto& parameter : parameters) reshard_and_view(parameter).local.copy_(parameter.grad());
    const double expected = at::cat({of_part, of_all}).norm().item<double>();
    EXPECT_NEAR(total_grad_norm(parameters).item<double>(), expected, 1e-6 * expected);
    EXPECT_NEAR(total_parameter_norm(parameters).item<double>(), expected, 1e-6 * expected);
    parameters[1].mutable_grad().zero_();
    EXPECT_EQ(count_zero_gradients(parameters).item<double>(), 2 * 2);
  });
}

TEST(GradNormTest, StridedGradientsAndTiedParameters) {
  auto parameter = at::zeros({3, 4}).requires_grad_();
  parameter.mutable_grad() = at::arange(12, at::kFloat).view({4, 3}).t();
  const double expected = at::arange(12, at::kFloat).norm().item<double>();
  EXPECT_NEAR(total_grad_norm({parameter, parameter}).item<double>(), expected, 1e-5);
  clip_grad_norm_({parameter, parameter}, 1.0);
  EXPECT_NEAR(parameter.grad().norm().item<double>(), 1.0, 1e-5);
}

TEST(GradNormTest, ClippingMovesTheVersion) {
  const auto parameters = with_gradients();
  const auto before = parameters[0].grad()._version();
  clip_grad_norm_(parameters, 0.1);
  EXPECT_GT(parameters[0].grad()._version(), before);
}

TEST(GradNormTest, NotANumberIsReported) {
  const auto parameters = with_gradients();
  parameters[0].grad().view({-1})[5] = std::nan("");
  for (const double norm_type : {1.0, 2.0, kInf}) {
    EXPECT_TRUE(std::isnan(total_grad_norm(parameters, norm_type).item<double>())) << norm_type;
  }
}

TEST(GradNormTest, WrongArguments) {
  EXPECT_THROW(total_grad_norm(with_gradients(), 0), c10::Error);
  EXPECT_THROW(clip_grad_norm_(with_gradients(), 0), c10::Error);
  EXPECT_EQ(total_grad_norm({}).item<double>(), 0);
}

}  // namespace
}  // namespace megashard
