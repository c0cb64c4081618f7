// Rotates queries and keys in place, as columns of the joint product.

#include "models/kernels/row_layout.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/kernels/fused_ops.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kBatch = 2, kLength = 5, kQueries = 3, kKeys = 2, kHeadDim = 24;

struct Inputs {
  at::Tensor whole, cos, sin;
  Tensors grads;
};

Inputs inputs(at::ScalarType dtype, int64_t half, bool of_batch) {
  const auto device = device_of_tests();
  const auto angles = 3 * (of_batch ? at::randn({kBatch, kLength, half}) : at::randn({kLength, half}));
  Inputs made{at::randn({kBatch, kLength, (kQueries + 2 * kKeys) * kHeadDim}).to(device, dtype),
              angles.cos().to(device, dtype),
              angles.sin().to(device, dtype),
              {}};
  for (const int64_t heads : {kQueries, kKeys, kKeys})
    made.grads.push_back(at::randn({kBatch, kLength, heads, kHeadDim}).to(device, dtype));
  return made;
}

/// Stands in for JointLinears: outputs are columns of one tensor, and their gradients must be columns of one, too.
struct Columns : torch::autograd::Function<Columns> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* /*context*/,
                                                const at::Tensor& whole) {
    return parts_of(whole.clone(), -1, {kQueries * kHeadDim, kKeys * kHeadDim, kKeys * kHeadDim});
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& grads) {
    EXPECT_TRUE(!are_wanted_beside || are_side_by_side(grads));
    return {joined_columns(grads).view({kBatch, kLength, -1})};
  }
  static inline bool are_wanted_beside = false;
};

Tensors rotated_apart(const Tensors& columns, const Inputs& of) {
  const auto heads = [](const at::Tensor& x) { return x.view({kBatch, kLength, -1, kHeadDim}); };
  return {rotate(heads(columns[0]), of.cos, of.sin), rotate(heads(columns[1]), of.cos, of.sin), heads(columns[2])};
}

void expect_the_bits_of_each_alone(const Inputs& given, const std::string& what) {
  const auto whole = given.whole.clone().requires_grad_();
  Columns::are_wanted_beside = false;
  const auto apart = rotated_apart(Columns::apply(whole), given);
  const auto grad_apart = torch::autograd::grad(apart, {whole}, given.grads)[0];
  Columns::are_wanted_beside = true;
  const auto columns = Columns::apply(whole);
  ASSERT_TRUE(can_rotate_columns(columns, given.cos));
  const auto turned = rotate_columns_(columns, kHeadDim, given.cos, given.sin);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(turned[i], apart[i])) << what << i;
    EXPECT_TRUE(turned[i].is_alias_of(turned[0])) << what << i;
  }
  EXPECT_TRUE(at::equal(torch::autograd::grad(turned, {whole}, given.grads)[0], grad_apart)) << what;

  const at::NoGradGuard no_grad;
  const auto without_grad = rotate_columns_(Columns::apply(whole), kHeadDim, given.cos, given.sin);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(without_grad[i], apart[i])) << what << i;
}

TEST(RotateColumns, HasTheBitsOfEachAlone) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t half : {12, 5}) {
      for (const bool of_batch : {false, true})
        expect_the_bits_of_each_alone(inputs(dtype, half, of_batch), c10::str(dtype, " ", half, of_batch, " "));
    }
  }
}

TEST(RotateColumns, TakesColumnsOfOneTensorOnly) {
  const auto given = inputs(at::kFloat, 12, false);
  auto columns = Columns::apply(given.whole);
  EXPECT_FALSE(can_rotate_columns({columns[1], columns[0], columns[2]}, given.cos)) << "in another order";
  EXPECT_FALSE(can_rotate_columns(columns, given.cos.to(at::kBFloat16)));
  columns[1] = columns[1].clone();
  EXPECT_FALSE(can_rotate_columns(columns, given.cos));
}

}  // namespace
}  // namespace megashard::testing
