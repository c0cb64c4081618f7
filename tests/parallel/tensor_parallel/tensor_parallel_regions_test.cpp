// Parts of tensor parallelism: regions, linears, and a parameter's layout.

#include "parallel/tensor_parallel_layout.h"

#include <ATen/Context.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include "parallel/tensor_parallel/tensor_parallel_regions.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensor_parallel_model.h"

namespace megashard::testing {
namespace {

at::Tensor leaf(at::IntArrayRef sizes, uint64_t seed) { return fixed(sizes, seed).requires_grad_(); }

TEST(TensorParallelRegions, CopyAndReduceAreCounterparts) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    const int rank = group->rank();
    const auto sum_of = [&](uint64_t seed) {
      return fixed({2, 3}, seed) + fixed({2, 3}, seed + 1) + fixed({2, 3}, seed + 2);
    };
    const at::Tensor x = leaf({2, 3}, 50);
    const at::Tensor copied = copy_to_tensor_parallel_region(x, group);
    EXPECT_TRUE(at::equal(copied, x));
    copied.backward(fixed({2, 3}, 10 + rank));
    EXPECT_TRUE(at::equal(x.grad(), sum_of(10)));

    const at::Tensor y = leaf({2, 3}, 20 + rank);
    const at::Tensor reduced = reduce_from_tensor_parallel_region(y, group);
    EXPECT_TRUE(at::equal(reduced, sum_of(20)));
    EXPECT_TRUE(at::equal(y, fixed({2, 3}, 20 + rank))) << "the input is left alone";
    reduced.backward(fixed({2, 3}, 30 + rank));
    EXPECT_TRUE(at::equal(y.grad(), fixed({2, 3}, 30 + rank)));
  });
}

TEST(TensorParallelRegions, ScatterAndGatherAreCounterparts) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    const int rank = group->rank();
    const at::Tensor whole = fixed({2, 2, 6}, 1);
    const at::Tensor x = leaf({2, 2, 6}, 1);
    const at::Tensor piece = scatter_to_tensor_parallel_region(x, group);
    EXPECT_TRUE(at::equal(piece, whole.narrow(-1, 2 * rank, 2)));
    piece.backward(fixed({2, 2, 6}, 2).narrow(-1, 2 * rank, 2));
    EXPECT_TRUE(at::equal(x.grad(), fixed({2, 2, 6}, 2)));

    const at::Tensor y = whole.narrow(-1, 2 * rank, 2).clone().requires_grad_();
    const at::Tensor gathered = gather_from_tensor_parallel_region(y, group);
    EXPECT_TRUE(at::equal(gathered, whole));
    gathered.backward(fixed({2, 2, 6}, 3));
    EXPECT_TRUE(at::equal(y.grad(), fixed({2, 2, 6}, 3).narrow(-1, 2 * rank, 2)));
    contains(message_of([&] {
               scatter_to_tensor_parallel_region(fixed({2, 4}, 1), group);
             }),
             "must be a multiple of their number");
  });
}

TEST(TensorParallelRegions, HaveSecondDerivatives) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const at::Tensor x = leaf({3}, 1);
    // Every rank's share of sum(x^3 / 2), so the sum of the shares' gradients is 3 x^2.
    const at::Tensor loss = copy_to_tensor_parallel_region(x, group).pow(3).sum() / 2;
    const auto first = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0];
    EXPECT_TRUE(at::allclose(first, 3 * x.detach().pow(2)));
    const auto second = torch::autograd::grad({first.sum()}, {x})[0];
    EXPECT_TRUE(at::allclose(second, 6 * x.detach())) << second;
  });
}

struct Draws {
  at::Tensor weight, bias;
};

template <class Linear>
Draws draws_of(const Linear& linear) {
  return {linear->weight.detach().cpu(), linear->bias.detach().cpu()};
}

TEST(TensorParallelLinear, StartsWithThePiecesOfALinearsWeights) {
  std::vector<Draws> columns, rows;
  at::manual_seed(7);
  const auto expected = draws_of(torch::nn::Linear(6, 4));
  for (int rank = 0; rank < 2; ++rank) {
    const auto tp = std::make_shared<DeviceMesh>(make_fake_group({.rank = rank, .world_size = 2}), std::vector<int>{2});
    at::manual_seed(7);
    columns.push_back(
        draws_of(ColumnParallelLinear(ColumnParallelLinearOptions{.in_features = 6, .out_features = 4, .mesh = tp})));
    at::manual_seed(7);
    rows.push_back(
        draws_of(RowParallelLinear(RowParallelLinearOptions{.in_features = 6, .out_features = 4, .mesh = tp})));
  }
  EXPECT_TRUE(at::equal(at::cat({columns[0].weight, columns[1].weight}), expected.weight));
  EXPECT_TRUE(at::equal(at::cat({columns[0].bias, columns[1].bias}), expected.bias));
  EXPECT_TRUE(at::equal(at::cat({rows[0].weight, rows[1].weight}, 1), expected.weight));
  for (const auto& row : rows) EXPECT_TRUE(at::equal(row.bias, expected.bias));
}

TEST(TensorParallelLinear, ComputeWhatALinearDoes) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto tp = flat_mesh(group);
    ColumnParallelLinear column(
        ColumnParallelLinearOptions{.in_features = 6, .out_features = 4, .mesh = tp, .gather_output = true});
    RowParallelLinear row(
        RowParallelLinearOptions{.in_features = 6, .out_features = 4, .mesh = tp, .input_is_parallel = false});
    const auto check = [&](torch::nn::Module& module, const at::Tensor& output, const at::Tensor& x) {
      const at::Tensor weight = fixed({4, 6}, 1) * 0.5, bias = fixed({4}, 2) * 0.5;
      weight.requires_grad_();
      bias.requires_grad_();
      const at::Tensor y = fixed({3, 6}, 9).requires_grad_();
      const at::Tensor expected = at::linear(y, weight, bias);
      expected.pow(2).sum().backward();
      expect_near(output.detach(), expected.detach(), "output");
      output.pow(2).sum().backward();
      expect_near(x.grad(), y.grad(), "gradient of the input");
      const auto parameters = module.parameters();
      expect_near(parameters[0].grad(), part_like(weight.grad(), parameters[0]), "weight");
      expect_near(parameters[1].grad(), part_like(bias.grad(), parameters[1]), "bias");
    };
    fill_whole(*column);
    fill_whole(*row);
    const at::Tensor x = leaf({3, 6}, 9), z = leaf({3, 6}, 9);
    check(*column, column(x), x);
    check(*row, row(z), z);
    contains(message_of([&] {
               RowParallelLinear(RowParallelLinearOptions{.in_features = 6, .out_features = 4, .mesh = tp})(
                   fixed({3, 6}, 9));
             }),
             "with input_is_parallel the last dimension is this rank's piece");
  });
}

TEST(TensorParallelLinear, UnevenDivisionsAreRefused) {
  const auto tp = std::make_shared<DeviceMesh>(make_fake_group({.rank = 0, .world_size = 2}), std::vector<int>{2},
                                               std::vector<std::string>{"tp"});
  contains(message_of([&] {
             ColumnParallelLinear(ColumnParallelLinearOptions{.in_features = 6, .out_features = 7, .mesh = tp});
           }),
           "7 output features cannot be cut evenly over the 2 ranks of mesh (tp=2): pad them");
  contains(
      message_of([&] { RowParallelLinear(RowParallelLinearOptions{.in_features = 5, .out_features = 4, .mesh = tp}); }),
      "5 input features cannot be cut evenly");
  contains(message_of([&] { ColumnParallelLinear(ColumnParallelLinearOptions{.in_features = 6, .out_features = 4}); }),
           "needs options.mesh, a 1-D mesh");
}

TEST(TensorParallelLayout, OutlivesSetDataAndEndsWithTheTensor) {
  const auto tp = std::make_shared<DeviceMesh>(make_fake_group({.rank = 1, .world_size = 2}), std::vector<int>{2});
  at::Tensor weight = fixed({3, 4}, 1);
  EXPECT_TRUE(tensor_parallel_layouts(weight).empty());
  set_tensor_parallel(weight, tp, Placement::shard(-1));
  weight.set_data(fixed({3, 4}, 2).to(at::kDouble));
  const auto view = reshard_and_view(weight);
  EXPECT_EQ(view.global_sizes, (std::vector<int64_t>{3, 8}));
  EXPECT_EQ(view.offsets, (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(view.placements, (std::vector<Placement>{Placement::shard(1)}));
  // 200 tensors that are destroyed: a reused address has no layout.
  for (int i = 0; i < 200; ++i) {
    const at::Tensor other = fixed({2}, 1);
    EXPECT_TRUE(tensor_parallel_layouts(other).empty());
    set_tensor_parallel(other, tp, Placement::replicate());
  }
  EXPECT_FALSE(tensor_parallel_layouts(weight).empty());
}

TEST(TensorParallelLayout, WrongUsesAreNamed) {
  const auto world = make_fake_group({.rank = 0, .world_size = 4});
  const auto mesh = std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"dp", "tp"});
  at::Tensor weight = fixed({4, 6}, 1);
  contains(message_of([&] { set_tensor_parallel(weight, mesh, Placement::shard(0)); }),
           "needs a 1-D mesh (mesh->submesh({\"tp\"})), got (dp=2, tp=2)");
  contains(message_of([&] { set_tensor_parallel(weight, mesh->submesh({"tp"}), Placement::shard(2)); }),
           "cannot be sharded on dimension 2");
  contains(message_of([&] { set_tensor_parallel(weight, mesh->submesh({"tp"}), Placement::strided_shard(0, 2)); }),
           "the strided placement over the FSDP mesh follows from that");
  Formula unit({{4, 6}}, linear);
  fully_shard(unit, {.mesh = mesh->submesh({"dp"})});
  contains(message_of([&] { set_tensor_parallel(unit.w[0], mesh->submesh({"tp"}), {}); }),
           "'w0' is under fully_shard already");
  set_tensor_parallel(weight, mesh->submesh({"tp"}), Placement::shard(1));
  contains(message_of([&] {
             assign_full_parameter(weight, fixed({4, 5}, 1));
           }),
           "has sizes [4, 12] in the whole model and [4, 6] on each rank of 'tp'");
  const at::Tensor orphan = fixed({2}, 1);
  set_tensor_parallel(orphan, mesh_of_one(), Placement::shard(0));
  contains(message_of([&] { reshard_and_view(orphan); }), "keep the mesh while the model lives");
}

}  // namespace
}  // namespace megashard::testing
