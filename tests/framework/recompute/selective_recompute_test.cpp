// Recompute that keeps the outputs of chosen operators (create_selective_checkpoint_contexts).

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <functional>

#include "framework/recompute/kept_outputs.h"
#include "framework/recompute/recompute.h"
#include "tests/support/message_of.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;

int counted_runs = 0;  // backward waits for its threads

/// x + 1, counting how often the kernel runs.
at::Tensor counted_kernel(const at::Tensor& x) {
  ++counted_runs;
  return x + 1;
}

TORCH_LIBRARY(megashard_test, library) { library.def("counted(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(megashard_test, CPU, library) { library.impl("counted", &counted_kernel); }

at::Tensor counted(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("megashard_test::counted", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x.detach());
}

using Compute = std::function<at::Tensor(const at::Tensor&)>;
struct ComputeImpl : torch::nn::Module {
  explicit ComputeImpl(Compute given) : compute(std::move(given)) {}
  at::Tensor forward(at::Tensor x) { return compute(x); }
  Compute compute;
};
using Region = Hooked<ComputeImpl>;

std::shared_ptr<Region> region(Compute compute, const std::vector<std::string>& save, bool early_stop = true) {
  auto module = std::make_shared<Region>(std::move(compute));
  RecomputeOptions options;
  options.save_outputs_of = save;
  options.early_stop = early_stop;
  recompute(*module, options);
  return module;
}

/// The output, the input's gradient and the generator's next number.
std::vector<at::Tensor> results_of(const std::function<at::Tensor(at::Tensor)>& forward, int backwards = 1) {
  at::manual_seed(3);
  const auto x = at::randn({6, 6}).requires_grad_();
  const auto y = forward(x);
  const auto loss = y.pow(2).sum();
  for (int i = backwards; i > 0; --i) loss.backward({}, /*retain_graph=*/i > 1);
  return {y.detach(), x.grad(), at::rand({2})};
}

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << "result " << i;
}

at::Tensor products(const at::Tensor& x) {
  const auto dropped = at::dropout(at::gelu(x.mm(x.tanh())), 0.25, /*train=*/true);
  return at::dropout((dropped * counted(dropped)).mm(x), 0.25, /*train=*/true);
}

TEST(SelectiveRecompute, KeptOperatorsRunOnceAndTheRestTwice) {
  const auto expected = results_of(products);
  for (const bool early_stop : {true, false}) {
    counted_runs = 0;
    expect_same(results_of([&](at::Tensor x) {
                  return region(products, {"megashard_test::counted", "mm"}, early_stop)->forward(x);
                }),
                expected);
    EXPECT_EQ(counted_runs, 1);
    counted_runs = 0;
    expect_same(results_of([&](at::Tensor x) { return region(products, {"aten.mm.default"}, early_stop)->forward(x); }),
                expected);
    EXPECT_EQ(counted_runs, 2);
  }
}

TEST(SelectiveRecompute, ARetainedGraphServesTwice) {
  const auto expected = results_of(products, /*backwards=*/2);
  counted_runs = 0;
  expect_same(results_of([&](at::Tensor x) { return region(products, {"megashard_test::counted"})->forward(x); },
                         /*backwards=*/2),
              expected);
  EXPECT_EQ(counted_runs, 1);
}

TEST(SelectiveRecompute, AKeptOperatorThatDrawsMovesTheGeneratorOn) {
  const Compute draws = [](const at::Tensor& x) {
    const auto first = std::get<0>(at::native_dropout(x.exp(), 0.5, /*train=*/true));
    return at::dropout(first * x, 0.5, /*train=*/true) * x;  // another operator, not kept
  };
  const auto expected = results_of(draws);
  expect_same(results_of([&](at::Tensor x) {
                return region(draws, {"aten::native_dropout"}, /*early_stop=*/false)->forward(x);
              }),
              expected);
}

TEST(SelectiveRecompute, Nests) {
  const std::vector<std::string> kept = {"megashard_test::counted"};
  const auto expected = results_of([](at::Tensor x) { return products(products(x)) * x; });
  for (const bool outer_keeps : {true, false}) {
    for (const bool inner_keeps : {true, false}) {
      const auto inner = region(products, inner_keeps ? kept : std::vector<std::string>{});
      const auto outer = region([inner](const at::Tensor& x) { return inner->forward(inner->forward(x)) * x; },
                                outer_keeps ? kept : std::vector<std::string>{});
      expect_same(results_of([&](at::Tensor x) { return outer->forward(x); }), expected);
    }
  }
}

TEST(SelectiveRecompute, ScaledDotProductAttentionMeansItsFusedKernels) {
  const auto operators = detail::operators_named({"scaled_dot_product_attention"});
  EXPECT_GE(operators.size(), 3U);
  const Compute attend = [](const at::Tensor& x) {
    const auto heads = x.view({1, 2, 3, 6});
    return (at::scaled_dot_product_attention(heads, heads * 2, heads) * heads).view({6, 6});
  };
  expect_same(
      results_of([&](at::Tensor x) { return region(attend, {"aten::scaled_dot_product_attention"})->forward(x); }),
      results_of(attend));
}

TEST(SelectiveRecompute, AnotherOrderIsAnError) {
  int runs = 0;
  const auto fickle = region(
      [&runs](const at::Tensor& x) {
        const bool first = runs++ == 0;
        const auto early = first ? x.mm(x) : counted(x);
        return early.exp() * x * (first ? counted(early) : early.mm(early));
      },
      {"aten::mm", "megashard_test::counted"});
  EXPECT_THAT(message_of([&] { results_of([&](at::Tensor x) { return fickle->forward(x); }); }),
              HasSubstr("recompute of Compute: kept output 0 is of aten::mm, and "
                        "megashard_test::counted asks for it"));
}

TEST(SelectiveRecompute, AnotherNumberIsAnError) {
  for (const bool more : {true, false}) {
    int runs = 0;
    const auto fickle = region(
        [&runs, more](const at::Tensor& x) {
          if ((runs++ == 0) == more) return x * counted(x);
          return x * counted(counted(x));
        },
        {"megashard_test::counted"}, /*early_stop=*/false);
    EXPECT_THAT(message_of([&] { results_of([&](at::Tensor x) { return fickle->forward(x); }); }),
                HasSubstr(more ? "forward kept 1 outputs, and megashard_test::counted asks for one more"
                               : "forward kept 2 outputs, and only 1 were asked for"));
  }
}

TEST(SelectiveRecompute, AnOutputChangedInPlaceIsAnError) {
  const auto changing =
      region([](const at::Tensor& x) { return x.mm(x).relu_() * x.exp(); }, {"aten::mm"}, /*early_stop=*/false);
  EXPECT_THAT(message_of([&] { results_of([&](at::Tensor x) { return changing->forward(x); }); }),
              HasSubstr("the output of aten::mm that it kept was changed in place"));
}

TEST(SelectiveRecompute, RefusesWhatCannotBeKept) {
  const auto refusal = [](const std::string& name, bool reentrant = false) {
    return message_of([&] {
      Region module(Compute([](const at::Tensor& x) { return x; }));
      RecomputeOptions options;
      options.use_reentrant = reentrant;
      options.save_outputs_of = {name};
      recompute(module, options);
    });
  };
  EXPECT_THAT(refusal("aten::linear"), HasSubstr("made of other operators"));
  EXPECT_THAT(refusal("aten::relu_"), HasSubstr("it changes a tensor in place"));
  EXPECT_THAT(refusal("aten.view"), HasSubstr("it returns a view"));
  EXPECT_THAT(refusal("aten::bmmm"), HasSubstr("no such operator; did you mean aten::bmm?"));
  EXPECT_THAT(refusal("aten::mm", true), HasSubstr("set use_reentrant to false"));
}

}  // namespace
}  // namespace megashard::testing
