// Operators that save the weight itself or a view of it: the view sees the bytes gathered again for backward.

#include <ATen/Functions.h>

#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

struct Operator {
  const char* name;
  Sizes parameters;
  std::vector<int64_t> input;
  Body body;
  bool indices = false;  // the input holds indices
};

at::Tensor attention(const Weights& w, at::Tensor x) {
  const auto heads = at::linear(x, w[0]).view({2, 5, 3, 2, 6}).permute({2, 0, 3, 1, 4}).unbind(0);
  return at::scaled_dot_product_attention(heads[0], heads[1], heads[2]);
}

at::Tensor gated(const Weights& w, at::Tensor x) {
  const auto halves = w[0].chunk(2, 0);
  return at::linear(x, halves[0]) * at::sigmoid(at::linear(x, halves[1]));
}

at::Tensor changed_clone(const Weights& w, at::Tensor x) {
  at::Tensor twice = w[0].clone();
  twice.mul_(2);
  return x * twice;
}

const std::vector<Operator>& operators() {
  using at::Tensor;
  static const std::vector<Operator> all = {
      {"linear", {{8, 6}, {8}}, {4, 6}, [](auto& w, Tensor x) { return at::linear(x, w[0], w[1]); }},
      {"linear_without_bias", {{8, 6}}, {4, 6}, [](auto& w, Tensor x) { return at::linear(x, w[0]); }},
      {"linear_3d", {{7, 6}, {7}}, {2, 4, 6}, [](auto& w, Tensor x) { return at::linear(x, w[0], w[1]); }},
      {"linear_twice",
       {{6, 6}},
       {4, 6},
       [](auto& w, Tensor x) { return at::linear(at::gelu(at::linear(x, w[0])), w[0]); }},
      {"embedding", {{10, 6}}, {4, 5}, [](auto& w, Tensor x) { return at::embedding(w[0], x); }, true},
      {"tied_head",
       {{11, 6}},
       {4, 5},
       [](auto& w, Tensor x) { return at::linear(at::embedding(w[0], x), w[0]); },
       true},
      {"layer_norm", {{6}, {6}}, {4, 6}, [](auto& w, Tensor x) { return at::layer_norm(x, {6}, w[0], w[1]); }},
      {"rms_norm", {{6}}, {4, 6}, [](auto& w, Tensor x) { return at::rms_norm(x, {6}, w[0], 1e-5); }},
      {"conv2d", {{8, 3, 3, 3}, {8}}, {2, 3, 8, 8}, [](auto& w, Tensor x) { return at::conv2d(x, w[0], w[1], 1, 1); }},
      {"batch_norm",
       {{3}, {3}},
       {2, 3, 8, 8},
       [](auto& w, Tensor x) { return at::batch_norm(x, w[0], w[1], {}, {}, true, 0.1, 1e-5, false); }},
      {"attention", {{36, 12}}, {2, 5, 12}, attention},
      {"chunks", {{12, 6}}, {4, 6}, gated},
      {"elementwise", {{6}}, {4, 6}, [](auto& w, Tensor x) { return x * w[0] + w[0]; }},
      {"matmul", {{6, 8}}, {4, 6}, [](auto& w, Tensor x) { return x.matmul(w[0]); }},
      {"bmm", {{3, 6, 8}}, {3, 4, 6}, [](auto& w, Tensor x) { return at::bmm(x, w[0]); }},
      {"weight_norm",
       {{8, 6}, {8, 1}},
       {4, 6},
       [](auto& w, Tensor x) { return at::linear(x, w[1] * w[0] / w[0].norm(2, {1}, true)); }},
      {"prelu", {{6}}, {4, 6}, [](auto& w, Tensor x) { return at::prelu(x, w[0]); }},
      {"group_norm", {{6}, {6}}, {4, 6, 3, 3}, [](auto& w, Tensor x) { return at::group_norm(x, 2, w[0], w[1]); }},
      {"einsum",
       {{6, 8}},
       {4, 5, 6},
       [](auto& w, Tensor x) {
         return at::einsum("bsd,df->bsf", {x, w[0]});
       }},
      {"changed_clone", {{6}}, {4, 6}, changed_clone},
  };
  return all;
}

struct OperatorCase {
  size_t index;
  at::ScalarType dtype;
};

class FsdpOperators : public ::testing::TestWithParam<OperatorCase> {};

TEST_P(FsdpOperators, ReadTheWeightsGatheredAgain) {
  const Operator& each = operators()[GetParam().index];
  const at::ScalarType dtype = GetParam().dtype;
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = true};
    if (dtype != at::kFloat) options.mixed_precision.param_dtype = dtype;
    Twins twins(each.parameters, each.body, options);
    auto input = [&] {
      if (each.indices) return at::arange(20).view(each.input).remainder(10);
      return fixed(each.input, 7).to(dtype).requires_grad_();
    };
    const at::Tensor x = input(), y = input();
    const auto version = twins.unit.w[0]._version();
    const at::Tensor expected = twins.plain.forward(x);
    const at::Tensor output = twins.unit.forward(y);
    ASSERT_TRUE(at::equal(output, expected));
    twins.expect_sharded();
    const at::Tensor other_memory = at::full({100000}, NAN);  // may take the weights' former memory
    expected.pow(2).sum().backward();
    output.pow(2).sum().backward();
    twins.expect_equal_gradients();
    if (!each.indices) {
      EXPECT_TRUE(at::equal(y.grad(), x.grad()));
    }
    for (const auto& w : twins.unit.w) {
      EXPECT_TRUE(w.is_leaf());
      EXPECT_EQ(w._version(), version);
    }
  });
}

std::vector<OperatorCase> all_cases() {
  std::vector<OperatorCase> cases;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (size_t i = 0; i < operators().size(); ++i) cases.push_back({i, dtype});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, FsdpOperators, ::testing::ValuesIn(all_cases()), [](const auto& info) {
  return std::string(operators()[info.param.index].name) + (info.param.dtype == at::kFloat ? "_fp32" : "_bf16");
});

}  // namespace
}  // namespace megashard::testing
