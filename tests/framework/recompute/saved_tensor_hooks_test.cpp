#include "framework/recompute/saved_tensor_hooks.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>

#include <cstdio>
#include <cstdlib>

namespace megashard {
namespace {

/// Keeps saved tensors in bfloat16, so that its work shows in the gradients.
struct Rounding : SavedTensorProvider {
  struct Hook : SavedTensorHook {
    void call_pack_hook(const at::Tensor& tensor) override { kept = tensor.detach().to(at::kBFloat16); }
    at::Tensor call_unpack_hook() override { return kept.to(at::kFloat); }
    at::Tensor kept;
  };
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    ++asked;
    return std::make_unique<Hook>();
  }
  int asked = 0;
};

at::Tensor gradient_of_square(const at::Tensor& x) {
  const auto leaf = x.detach().clone().requires_grad_();
  leaf.pow(2).sum().backward();
  return leaf.grad();
}

TEST(SavedTensorHooks, PackWhatAutogradSaves) {
  const auto x = at::rand({16});
  EXPECT_TRUE(at::equal(gradient_of_square(x), x * 2));
  Rounding rounding;
  {
    const SavedTensorHooks hooks(&rounding);
    EXPECT_TRUE(at::equal(gradient_of_square(x), x.to(at::kBFloat16).to(at::kFloat) * 2));
  }
  EXPECT_EQ(rounding.asked, 1);
  EXPECT_TRUE(at::equal(gradient_of_square(x), x * 2));
}

TEST(SavedTensorHooks, TheInnermostGuardCounts) {
  const auto x = at::rand({16});
  Rounding outer, inner;
  const SavedTensorHooks outer_hooks(&outer);
  {
    const SavedTensorHooks none(nullptr);
    EXPECT_TRUE(at::equal(gradient_of_square(x), x * 2));
    const SavedTensorHooks inner_hooks(&inner);
    gradient_of_square(x);
  }
  EXPECT_EQ(outer.asked, 0);
  gradient_of_square(x);
  EXPECT_EQ(outer.asked, 1);
  EXPECT_EQ(inner.asked, 1);
}

torch::autograd::Engine* ours = nullptr;

TEST(SavedTensorHooks, AnEngineThatComesLateIsNoticed) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";  // a process in which no backward ran yet
  const auto late = [] {
    using torch::autograd::Engine;
    ours = &Engine::get_default_engine();
    torch::autograd::set_default_engine_stub(&Engine::get_base_engine);
    gradient_of_square(at::ones({2}));
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *ours; });
    try {
      gradient_of_square(at::ones({2}));
    } catch (const c10::Error& error) {
      std::fputs(error.what_without_backtrace(), stderr);
      std::_Exit(3);
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(late(), testing::ExitedWithCode(3), "before megashard's autograd engine was installed");
}

}  // namespace
}  // namespace megashard
