#include "models/kernels/cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tanh.h>
#include <gmock/gmock.h>

#include "tests/models/kernels/against_fp64.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using at::Tensor;
using testing::expect_same;
using testing::Tensors;

Tensor plain_losses(const Tensor& logits, const Tensor& labels) {
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), labels.reshape({-1}), {}, /*reduction=*/0,
                                kIgnoredLabel)
      .view(labels.sizes());
}

TEST(CrossEntropy, OfEachToken) {
  auto labels = at::randint(0, 1037, {2, 6}, at::kLong);
  labels[1][2] = kIgnoredLabel;
  expect_same(
      {at::randn({2, 6, 1037}) * 10}, [&](const Tensors& in) { return token_cross_entropy(in[0] * 1, labels); },
      [&](const Tensors& in) { return plain_losses(in[0], labels); });
}

TEST(CrossEntropy, KeepsOneCopyOfTheLogits) {
  const auto x = at::randn({4, 100}).requires_grad_();
  const auto logits = x * 1;
  const auto loss = token_cross_entropy(logits, at::randint(0, 100, {4}, at::kLong)).sum();
  const auto grad = torch::autograd::grad({loss}, {logits}, {}, /*retain_graph=*/true).front();
  EXPECT_EQ(grad.const_data_ptr(), logits.const_data_ptr());
  EXPECT_THAT([&] { loss.backward(); },
              ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr("call backward once")));
}

Tensor some_labels() {
  auto labels = at::randint(0, 101, {3, 7}, at::kLong);
  labels[1][2] = kIgnoredLabel;
  return labels;
}

TEST(CrossEntropy, OfAHeadInPartsOfTheTokens) {
  const auto labels = some_labels();
  for (const int64_t rows : {1, 5, 20, 21}) {  // the last: one chunk
    expect_same(
        {at::randn({3, 7, 16}), at::randn({101, 16})},
        [&](const Tensors& in) {
          return linear_cross_entropy(in[0], in[1], labels, nullptr, {}, rows * 101).of_tokens;
        },
        [&](const Tensors& in) { return plain_losses(in[0].matmul(in[1].t()), labels); });
  }
}

TEST(CrossEntropy, OfAHeadWithCappedLogits) {
  const auto labels = some_labels();
  const auto plain = [&](const Tensors& in) {
    return plain_losses(at::tanh(in[0].matmul(in[1].t()) / 2.5) * 2.5, labels);
  };
  for (const int64_t rows : {5, 21}) {
    expect_same(
        {at::randn({3, 7, 16}), at::randn({101, 16})},
        [&](const Tensors& in) {
          return linear_cross_entropy(in[0], in[1], labels, nullptr, {}, rows * 101, /*softcap=*/2.5).of_tokens;
        },
        plain, /*times=*/2);  // the cap and its slope round logits again
  }
  const auto weights = at::randn({3, 7});
  const auto x = at::randn({3, 7, 16}).requires_grad_(), w = at::randn({101, 16}).requires_grad_();
  const auto wanted = torch::autograd::grad({(plain({x, w}) * weights).sum()}, {x, w});
  const auto got = linear_cross_entropy(x, w, labels, nullptr, weights, 5 * 101, /*softcap=*/2.5);
  const auto grads = torch::autograd::grad({got.weighted}, {x, w});
  EXPECT_TRUE(at::allclose(grads[0], wanted[0], 1e-5, 1e-5));
  EXPECT_TRUE(at::allclose(grads[1], wanted[1], 1e-5, 1e-5));
}

TEST(CrossEntropy, OfAHeadInPartsAndPiecesOfTheVocabulary) {
  const auto labels = some_labels().clamp(kIgnoredLabel, 99);
  const auto states = at::randn({3, 7, 16}), weight = at::randn({100, 16}), grad = at::randn({3, 7});
  const auto x = states.clone().requires_grad_(), w = weight.clone().requires_grad_();
  const auto losses = token_cross_entropy(x.matmul(w.t()), labels);
  const auto wanted = torch::autograd::grad({losses}, {x, w}, {grad});
  testing::run_ranks(2, [&](const ProcessGroupPtr& world) {
    const auto own_x = states.clone().requires_grad_();
    const auto own_w = weight.narrow(0, world->rank() * 50, 50).clone().requires_grad_();
    const auto got = linear_cross_entropy(own_x, own_w, labels, world, {}, 4 * 50).of_tokens;
    EXPECT_TRUE(at::allclose(got, losses, 1e-5, 1e-5));
    const auto grads = torch::autograd::grad({got}, {own_x, own_w}, {grad});
    world->all_reduce(grads[0], ReduceOp::kSum).wait();  // sum over the ranks' parts of the head
    EXPECT_TRUE(at::allclose(grads[0], wanted[0], 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(grads[1], wanted[1].narrow(0, world->rank() * 50, 50), 1e-5, 1e-5));
  });
}

Tensor weighted_sum(const Tensor& losses, const Tensor& weights) { return (losses * weights).sum(); }

TEST(CrossEntropy, OfAHeadInPartsWithWeights) {
  const auto labels = some_labels();
  const auto weights = at::randn({3, 7});
  const auto x = at::randn({3, 7, 16}).requires_grad_(), w = at::randn({101, 16}).requires_grad_();
  const auto losses = plain_losses(x.matmul(w.t()), labels);
  const auto wanted = torch::autograd::grad({losses}, {x, w}, {weights});
  for (const int64_t rows : {5, 20}) {
    const auto got = linear_cross_entropy(x, w, labels, nullptr, weights, rows * 101);
    EXPECT_TRUE(at::allclose(got.of_tokens, losses, 1e-5, 1e-5));
    EXPECT_FALSE(got.of_tokens.requires_grad());
    EXPECT_TRUE(at::allclose(got.weighted, weighted_sum(losses, weights), 1e-5, 1e-5));
    const auto grads = torch::autograd::grad({got.weighted * 0.3}, {x, w});
    EXPECT_TRUE(at::allclose(grads[0], wanted[0] * 0.3, 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(grads[1], wanted[1] * 0.3, 1e-5, 1e-5));
  }
}

TEST(CrossEntropy, WeightsAndPiecesOfTheVocabulary) {
  const auto labels = some_labels().clamp(kIgnoredLabel, 99);
  const auto weights = at::randn({3, 7});
  const auto states = at::randn({3, 7, 16}), weight = at::randn({100, 16});
  const auto x = states.clone().requires_grad_(), w = weight.clone().requires_grad_();
  const auto loss = weighted_sum(token_cross_entropy(x.matmul(w.t()), labels), weights);
  const auto wanted = torch::autograd::grad({loss}, {x, w});
  testing::run_ranks(2, [&](const ProcessGroupPtr& world) {
    const auto own_x = states.clone().requires_grad_();
    const auto own_w = weight.narrow(0, world->rank() * 50, 50).clone().requires_grad_();
    const auto got = linear_cross_entropy(own_x, own_w, labels, world, weights, 4 * 50).weighted;
    const auto grads = torch::autograd::grad({got}, {own_x, own_w});
    world->all_reduce(grads[0], ReduceOp::kSum).wait();
    EXPECT_TRUE(at::allclose(grads[0], wanted[0], 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(grads[1], wanted[1].narrow(0, world->rank() * 50, 50), 1e-5, 1e-5));
  });
}

/// 16-bit gradients are scaled in fp32: 0.3 itself is off by 0.2% in bf16.
TEST(CrossEntropy, TheWeightedSumMayBeScaled) {
  const auto labels = some_labels();
  const auto x = at::randn({3, 7, 16}).to(at::kBFloat16).requires_grad_();
  const auto w = at::randn({101, 16}).to(at::kBFloat16).requires_grad_();
  const auto gradients_of = [&](double scale) {
    const auto loss = linear_cross_entropy(x, w, labels, nullptr, at::ones({3, 7}), 5 * 101).weighted * scale;
    return torch::autograd::grad({loss}, {x, w});
  };
  const auto plain = gradients_of(1), scaled = gradients_of(0.3);
  for (size_t i = 0; i < plain.size(); ++i)
    EXPECT_TRUE(at::equal(scaled[i], (plain[i].to(at::kFloat) * 0.3).to(at::kBFloat16))) << i;
}

TEST(CrossEntropy, BackwardRunsOnce) {
  const auto x = at::randn({3, 7, 16}).requires_grad_(), w = at::randn({101, 16}).requires_grad_();
  const auto loss = linear_cross_entropy(x, w, some_labels(), nullptr, at::ones({3, 7}), 5 * 101).weighted;
  loss.backward({}, /*keep_graph=*/true);
  EXPECT_THAT([&] { loss.backward(); },
              ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr("call backward once")));
}

TEST(CrossEntropy, OfAHeadInPartsNeverHasAllLogits) {
  MEGASHARD_NOT_ON_SIM("it counts what the CPU's allocator gives");
  auto& allocator = *new testing::CountingAllocator;
  const auto labels = at::randint(0, 4096, {256}, at::kLong);
  const auto x = at::randn({256, 8}).requires_grad_(), w = at::randn({4096, 8}).requires_grad_();
  const auto before = allocator.live();
  std::vector<size_t> peaks;
  for (const auto& weights : {Tensor(), at::ones({256})}) {
    allocator.reset_peak();
    const auto losses = linear_cross_entropy(x, w, labels, nullptr, weights, 16 * 4096);
    (weights.defined() ? losses.weighted : losses.of_tokens.sum()).backward();
    peaks.push_back(allocator.peak() - before);
  }
  allocator.stop();
  EXPECT_THAT(peaks, ::testing::Each(::testing::Lt(256 * 4096 * 4 / 4)));  // of all; 16 tokens take a sixteenth
}

TEST(CrossEntropy, ALabelOutsideTheVocabularyIsAnError) {
  MEGASHARD_NOT_ON_SIM("on a GPU the kernel asserts, as a check would stall the stream");
  EXPECT_THAT(
      [] {
        token_cross_entropy(at::randn({1, 5}), at::ones({1}, at::kLong) * 5);
      },
      ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr("label 5 lies outside the model's vocabulary of 5")));
}

}  // namespace
}  // namespace megashard
