#include "framework/recompute/recompute.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <thread>

#include "framework/recompute/saved_tensor_hooks.h"
#include "parallel/fsdp/recompute_scope.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

namespace nn = torch::nn;

struct LayerImpl : nn::Module {
  explicit LayerImpl(int64_t width, double dropout = 0.25) : dropout_(dropout) {
    up = register_module("up", nn::Linear(width, 2 * width));
    down = register_module("down", nn::Linear(2 * width, width));
  }
  at::Tensor forward(at::Tensor x) {
    ++runs;
    if (fail) throw std::runtime_error("forward failed");
    const auto hidden = at::dropout(at::gelu(up(x)), dropout_, /*train=*/dropout_ > 0);
    auto y = x + down(hidden);
    ++runs_to_the_end;
    return y;
  }
  nn::Linear up{nullptr}, down{nullptr};
  double dropout_;
  int runs = 0, runs_to_the_end = 0;
  bool fail = false;
};
using Layer = Hooked<LayerImpl>;

struct StackImpl : nn::Module {
  StackImpl(int64_t width, int layers, double dropout = 0.25) {
    for (int i = 0; i < layers; ++i) {
      each.push_back(register_module("layer" + std::to_string(i), std::make_shared<Layer>(width, dropout)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : each) x = layer->forward(x);
    return x.tanh();
  }
  std::vector<std::shared_ptr<Layer>> each;
};
using Stack = Hooked<StackImpl>;

enum class Where { kNowhere, kOutside, kInside, kBoth };

std::shared_ptr<Stack> make_stack(Where where, const RecomputeOptions& options, double dropout = 0.25) {
  at::manual_seed(2);
  auto stack = std::make_shared<Stack>(8, 3, dropout);
  if (where == Where::kOutside || where == Where::kBoth) recompute(*stack, options);
  if (where == Where::kInside || where == Where::kBoth) {
    for (const auto& layer : stack->each) recompute(*layer, options);
  }
  return stack;
}

/// Two forwards, then their backwards, then another draw: everything that recompute could disturb.
std::vector<at::Tensor> train(Stack& stack, bool twice = false) {
  at::manual_seed(4);
  const auto x = at::randn({5, 8}).requires_grad_();
  const auto first = stack.forward(x).pow(2).sum();
  const auto second = stack.forward(x * 2).sum();
  if (twice) second.backward({}, /*retain_graph=*/true);
  second.backward();
  first.backward();
  std::vector<at::Tensor> results{first.detach(), second.detach(), x.grad(), at::rand({3})};
  for (const auto& parameter : stack.parameters()) results.push_back(parameter.grad());
  return results;
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << "result " << i;
}

class RecomputeFlavours : public ::testing::TestWithParam<std::tuple<bool, Where>> {};

TEST_P(RecomputeFlavours, EqualNone) {
  const auto [reentrant, where] = GetParam();
  auto plain = make_stack(Where::kNowhere, {});
  auto recomputed = make_stack(where, {.use_reentrant = reentrant});
  expect_equal(train(*recomputed), train(*plain));
  EXPECT_GT(recomputed->each[0]->runs, 2);
}

TEST_P(RecomputeFlavours, ARetainedGraphServesTwice) {
  const auto [reentrant, where] = GetParam();
  auto plain = make_stack(Where::kNowhere, {});
  auto recomputed = make_stack(where, {.use_reentrant = reentrant});
  expect_equal(train(*recomputed, true), train(*plain, true));
}

INSTANTIATE_TEST_SUITE_P(All, RecomputeFlavours,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(Where::kOutside, Where::kInside, Where::kBoth)));

TEST(Recompute, WithoutRngStateDropoutDiffers) {
  auto plain = make_stack(Where::kNowhere, {});
  auto recomputed = make_stack(Where::kInside, {.preserve_rng_state = false});
  EXPECT_FALSE(at::equal(train(*recomputed)[2], train(*plain)[2]));  // the input's gradient
}

TEST(Recompute, OtherGeneratorsAreReplayed) {
  struct NoiseImpl : nn::Module {
    at::Tensor forward(at::Tensor x) { return at::rand(x.sizes(), generator) * x.exp(); }
    at::Generator generator = testing::generator_of_tests(3);
  };
  std::vector<at::Tensor> gradients;
  for (const bool on : {false, true}) {
    auto module = std::make_shared<Hooked<NoiseImpl>>();
    if (on) recompute(*module, {.generators = {module->generator}});
    const auto x = at::ones({4}).requires_grad_();
    module->forward(x).sum().backward();
    gradients.push_back(x.grad());
    gradients.push_back(at::rand({2}, module->generator));
  }
  EXPECT_TRUE(at::equal(gradients[0], gradients[2]));
  EXPECT_TRUE(at::equal(gradients[1], gradients[3]));
}

TEST(Recompute, StopsEarly) {
  for (const bool early : {true, false}) {
    Layer layer(8);
    recompute(layer, {.early_stop = early});
    layer.forward(at::ones({2, 8}).requires_grad_()).sum().backward();
    EXPECT_EQ(layer.runs, 2);
    EXPECT_EQ(layer.runs_to_the_end, early ? 1 : 2);
  }
}

/// Bytes that autograd would keep, seen by a provider around everything.
struct CountSaved : SavedTensorProvider {
  struct Hook : SavedTensorHook {
    explicit Hook(CountSaved& owner) : owner_(owner) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      owner_.bytes += tensor.nbytes();
      kept_ = tensor.detach();
    }
    at::Tensor call_unpack_hook() override { return kept_; }
    CountSaved& owner_;
    at::Tensor kept_;
  };
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override { return std::make_unique<Hook>(*this); }
  size_t bytes = 0;
};

TEST(Recompute, KeepsInputsAlone) {
  const auto saved_by = [](Where where) {
    auto stack = make_stack(where, {});
    CountSaved counter;
    const SavedTensorHooks hooks(&counter);
    stack->forward(at::ones({5, 8}).requires_grad_());
    return counter.bytes;
  };
  EXPECT_EQ(saved_by(Where::kOutside), 5 * 8 * 4u);
  EXPECT_EQ(saved_by(Where::kInside), 4 * 5 * 8 * 4u);  // three inputs, and tanh's result
  EXPECT_EQ(saved_by(Where::kBoth), 5 * 8 * 4u);
  EXPECT_GT(saved_by(Where::kNowhere), 20 * 5 * 8 * 4u);
}

TEST(Recompute, HooksThatKeepTheTensorChangeNothing) {
  auto plain = make_stack(Where::kNowhere, {});
  const auto expected = train(*plain);
  auto hooked = make_stack(Where::kNowhere, {});
  CountSaved counter;
  const SavedTensorHooks hooks(&counter);
  expect_equal(train(*hooked), expected);
  EXPECT_GT(counter.bytes, 0u);
}

TEST(Recompute, AnExceptionEndsTheGuards) {
  for (const bool reentrant : {false, true}) {
    auto stack = make_stack(Where::kBoth, {.use_reentrant = reentrant});
    const auto y = stack->forward(at::ones({5, 8}).requires_grad_()).sum();
    stack->each[1]->fail = true;
    EXPECT_THROW(y.backward(), std::runtime_error);
    EXPECT_THROW(stack->forward(at::ones({5, 8})), std::runtime_error);
    EXPECT_EQ(RecomputeScope::current(), nullptr);
    stack->each[1]->fail = false;
    auto plain = make_stack(Where::kNowhere, {});
    for (auto& parameter : stack->parameters()) parameter.mutable_grad().reset();
    expect_equal(train(*stack), train(*plain));
  }
}

TEST(Recompute, AForwardThatDiffersIsAnError) {
  struct FickleImpl : nn::Module {
    at::Tensor forward(at::Tensor x) { return runs++ == 0 ? x.exp().exp() : x.exp().view({2, 2}).exp(); }
    int runs = 0;
  };
  auto module = std::make_shared<Hooked<FickleImpl>>();
  recompute(*module, {});
  const auto y = module->forward(at::ones({4}).requires_grad_()).sum();
  try {
    y.backward();
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("recompute of Fickle: saved tensor 1 was Float[4]"));
  }
}

TEST(Recompute, InputsChangedInPlaceAreAnError) {
  for (const bool reentrant : {false, true}) {
    Layer layer(8);
    recompute(layer, {.use_reentrant = reentrant});
    const auto x = at::ones({2, 8}).requires_grad_() * 1;
    const auto y = layer.forward(x);
    x.add_(1);
    EXPECT_THROW(y.sum().backward(), c10::Error);
  }
}

TEST(Recompute, ParametersLearnWhenInputsNeedNoGradient) {
  auto plain = make_stack(Where::kNowhere, {}, 0);
  auto recomputed = make_stack(Where::kInside, {.use_reentrant = true}, 0);
  for (auto& stack : {plain, recomputed}) stack->forward(at::ones({5, 8})).sum().backward();
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(recomputed->parameters()[i].grad(), plain->parameters()[i].grad()));
  }
}

TEST(Recompute, ReentrantServesBackwardOnly) {
  Layer layer(8);
  recompute(layer, {.use_reentrant = true});
  const auto x = at::ones({2, 8}).requires_grad_();
  const auto y = layer.forward(x).sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x}), c10::Error);
}

TEST(Recompute, CallbacksRunBeforeTheInnerBackward) {
  struct ListeningImpl : nn::Module {
    at::Tensor forward(at::Tensor x) {
      if (auto* scope = RecomputeScope::current()) {
        scope->before_inner_backward([this] { order.push_back("before inner backward"); });
      }
      auto y = x * 2;
      if (at::GradMode::is_enabled()) y.register_hook([this](const at::Tensor&) { order.push_back("inner backward"); });
      return y;
    }
    std::vector<std::string> order;
  };
  auto module = std::make_shared<Hooked<ListeningImpl>>();
  recompute(*module, {.use_reentrant = true});
  module->forward(at::ones({2}).requires_grad_()).sum().backward();
  EXPECT_THAT(module->order, ::testing::ElementsAre("before inner backward", "inner backward"));
}

TEST(Recompute, AutocastHoldsInTheSecondRun) {
  std::vector<at::Tensor> gradients;
  for (const bool on : {false, true}) {
    at::manual_seed(1);
    Layer layer(8, 0);
    if (on) recompute(layer, {});
    const auto device = testing::device_of_tests().type();
    at::autocast::set_autocast_dtype(device, at::kBFloat16);
    at::autocast::set_autocast_enabled(device, true);
    const auto y = layer.forward(at::ones({2, 8}).requires_grad_()).sum();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device, false);
    y.backward();
    gradients.push_back(layer.up->weight.grad());
  }
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
}

TEST(Recompute, TheGraphOutlivesTheModule) {
  const auto x = at::ones({2, 8}).requires_grad_();
  at::Tensor y;
  {
    auto layer = std::make_shared<Layer>(8);
    recompute(*layer, {});
    y = layer->forward(x).sum();
  }
  y.backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(Recompute, RanksAsThreads) {
  auto plain = make_stack(Where::kNowhere, {}, 0);
  const auto x = at::randn({5, 8});
  plain->forward(x).pow(2).sum().backward();
  std::vector<std::shared_ptr<Stack>> stacks;
  for (int rank = 0; rank < 8; ++rank) stacks.push_back(make_stack(Where::kBoth, {.use_reentrant = rank % 2 == 1}, 0));
  std::vector<std::thread> threads;
  for (auto& stack : stacks) {
    threads.emplace_back([&stack, &x] {
      for (int step = 0; step < 5; ++step) {
        stack->zero_grad();
        stack->forward(x.detach().requires_grad_()).pow(2).sum().backward();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& stack : stacks) {
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(stack->parameters()[i].grad(), plain->parameters()[i].grad()));
    }
  }
}

TEST(Recompute, TwiceIsAnError) {
  Layer layer(8);
  recompute(layer, {});
  EXPECT_THROW(recompute(layer, {}), c10::Error);
}

}  // namespace
}  // namespace megashard
