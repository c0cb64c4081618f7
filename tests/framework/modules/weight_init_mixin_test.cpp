#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "framework/modules/deferred_replay.h"
#include "framework/modules/weight_init_mixin.h"
#include "framework/recompute/call_state.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

struct Net : torch::nn::Module, WeightInitMixin {
  Net() {
    register_module("linear", linear);
    register_module("norm", norm);
    register_module("embed", embed);
    register_module("padded", padded);
    register_module("head", head);
    scale = register_parameter("scale", at::full({1000}, 7.0));
    tie_parameter(*head, head->weight, embed->weight);
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(7);
  }
  torch::nn::Linear linear{64, 64};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({64})};
  torch::nn::Embedding embed{100, 64};
  torch::nn::Embedding padded{torch::nn::EmbeddingOptions(10, 4).padding_idx(0)};
  torch::nn::Linear head{torch::nn::LinearOptions(64, 100).bias(false)};
  at::Tensor scale;
};

double largest_off(const at::Tensor& x, double value) { return (x - value).abs().max().item<double>(); }

TEST(WeightInitMixin, EachKindOfModule) {
  Net net;
  net.weight_init().std = 0.05;
  net.init_weights();
  EXPECT_NEAR(net.linear->weight.std().item<double>(), 0.05, 0.005);
  EXPECT_EQ(largest_off(net.linear->bias, 0), 0);
  EXPECT_EQ(largest_off(net.norm->weight, 1), 0);
  EXPECT_EQ(largest_off(net.norm->bias, 0), 0);
  EXPECT_NEAR(net.embed->weight.std().item<double>(), 0.05, 0.005);
  EXPECT_EQ(largest_off(net.padded->weight, 7), 0);  // left
  EXPECT_NEAR(net.scale.std().item<double>(), 0.05, 0.01);
  EXPECT_TRUE(net.linear->weight.requires_grad());
}

TEST(WeightInitMixin, OnceAndNotWhatIsMarked) {
  Net net;
  net.mark_initialized(*net.linear);
  net.init_weights();
  EXPECT_EQ(largest_off(net.linear->weight, 7), 0);
  const auto before = net.embed->weight.clone();
  net.init_weights();
  EXPECT_TRUE(net.embed->weight.equal(before));
}

TEST(WeightInitMixin, AGeneratorOfItsOwnRepeats) {
  const auto draw = [] {
    Net net;
    net.weight_init().generator = testing::generator_of_tests(42);
    net.init_weights();
    return net.linear->weight;
  };
  EXPECT_TRUE(draw().equal(draw()));
}

TEST(Tie, OneTensorInMemberAndRegistration) {
  Net net;
  EXPECT_TRUE(net.head->weight.is_same(net.embed->weight));
  EXPECT_TRUE(net.named_parameters()["head.weight"].is_same(net.embed->weight));
  EXPECT_THROW(tie_parameter(*net.head, net.head->weight, net.scale), c10::Error);  // sizes
  EXPECT_THROW(tie_parameter(*net.linear, net.scale, net.scale), c10::Error);       // not the module's
}

class NormalInParts : public ::testing::Test {
 protected:
  void SetUp() override {
    MEGASHARD_NOT_ON_SIM("weights are drawn on the CPU");
    at::set_num_threads(3);
  }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

TEST_F(NormalInParts, AreTheNumbersOfOneThread) {
  for (const int64_t size : {1 << 18, (1 << 18) + 5, 3 * 16 * 6000 + 16, 300007}) {
    for (const int64_t drawn_before : {0, 1, 623, 624, 1000}) {
      auto one = at::detail::createCPUGenerator(7), other = at::detail::createCPUGenerator(7);
      at::rand({drawn_before}, one);
      at::rand({drawn_before}, other);
      const auto wanted = at::empty({size}).normal_(0.5, 2, one), got = at::empty({size});
      ASSERT_TRUE(normal_in_parts_(got, 0.5, 2, other));
      EXPECT_TRUE(at::equal(got, wanted)) << size << ", " << drawn_before;
      EXPECT_TRUE(same_generator_state(generator_state(one), generator_state(other))) << size << ", " << drawn_before;
    }
  }
}

TEST_F(NormalInParts, LeavesOthersAlone) {
  auto generator = at::detail::createCPUGenerator(7);
  const auto before = generator_state(generator);
  const auto numbers = at::empty({1 << 18, 2});
  EXPECT_FALSE(normal_in_parts_(numbers.select(1, 0), 0, 1, generator));
  EXPECT_FALSE(normal_in_parts_(numbers.to(at::kDouble), 0, 1, generator));
  EXPECT_FALSE(normal_in_parts_(numbers.narrow(0, 0, 100), 0, 1, generator));
  at::set_num_threads(1);
  EXPECT_FALSE(normal_in_parts_(numbers, 0, 1, generator));
  EXPECT_TRUE(same_generator_state(before, generator_state(generator)));
}

}  // namespace

}  // namespace megashard
