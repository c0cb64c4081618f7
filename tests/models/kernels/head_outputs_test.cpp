#include "models/kernels/head_outputs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tanh.h>
#include <gmock/gmock.h>

#include "models/kernels/cross_entropy.h"
#include "tests/models/kernels/against_fp64.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using at::Tensor;
using testing::expect_same;
using testing::Tensors;

constexpr int64_t kVocabulary = 100;

HeadQuestion some_question() {
  HeadQuestion question{.labels = at::randint(0, kVocabulary, {3, 7}, at::kLong), .entropies = true, .chosen = {}};
  question.chosen = at::randint(0, kVocabulary, {4, 3, 7}, at::kLong);
  question.labels[1][2] = kIgnoredLabel;
  return question;
}

/// The same by LibTorch's operators, for all logits.
HeadOutputs plain_outputs(const Tensor& hidden, const Tensor& weight, const HeadQuestion& question, double softcap) {
  const auto log_p = at::log_softmax(soft_capped(hidden.matmul(weight.t()), softcap), -1);
  const auto at_tokens = [&](const Tensor& tokens) { return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1); };
  std::vector<Tensor> log_probs;
  for (const auto& tokens : question.chosen.unbind()) log_probs.push_back(at_tokens(tokens));
  return {.losses = -at_tokens(question.labels.clamp_min(0)) * question.labels.ge(0),
          .entropies = -(log_p.exp() * log_p).sum(-1),
          .log_probs = at::stack(log_probs)};
}

TEST(HeadOutputs, EachInPartsOfTheTokens) {
  const auto question = some_question();
  const std::pair<const char*, Tensor HeadOutputs::*> outputs[] = {
      {"losses", &HeadOutputs::losses}, {"entropies", &HeadOutputs::entropies}, {"log_probs", &HeadOutputs::log_probs}};
  for (const auto& [name, output] : outputs) {
    for (const auto& [rows, softcap] : {std::pair{1, 0.0}, std::pair{5, 2.5}, std::pair{21, 0.0}}) {
      SCOPED_TRACE(name);
      expect_same(
          {at::randn({3, 7, 16}) / 2, at::randn({kVocabulary, 16})},
          [&, output = output, rows = rows, softcap = softcap](const Tensors& in) {
            return linear_head_outputs(in[0], in[1], question, nullptr, rows * kVocabulary, softcap).*output;
          },
          [&, output = output, softcap = softcap](const Tensors& in) {
            return plain_outputs(in[0], in[1], question, softcap).*output;
          },
          /*times=*/3);  // an entropy sums what 16 bits round of each logit
    }
  }
}

/// All three together, each with a gradient of its own.
Tensor mixture(const HeadOutputs& outputs, const Tensors& weights) {
  return (outputs.losses * weights[0]).sum() + (outputs.entropies * weights[1]).sum() +
         (outputs.log_probs * weights[2]).sum();
}

Tensors some_weights() { return {at::randn({3, 7}), at::randn({3, 7}), at::randn({4, 3, 7})}; }

TEST(HeadOutputs, TogetherAndPiecesOfTheVocabulary) {
  const auto question = some_question();
  const auto weights = some_weights();
  const auto states = at::randn({3, 7, 16}) / 2, weight = at::randn({kVocabulary, 16});
  const auto x = states.clone().requires_grad_(), w = weight.clone().requires_grad_();
  const auto loss = mixture(plain_outputs(x, w, question, 2.5), weights);
  const auto wanted = torch::autograd::grad({loss}, {x, w});
  testing::run_ranks(2, [&](const ProcessGroupPtr& world) {
    const auto own_x = states.clone().requires_grad_();
    const auto own_w = weight.narrow(0, world->rank() * 50, 50).clone().requires_grad_();
    const auto got = mixture(linear_head_outputs(own_x, own_w, question, world, 4 * 50, 2.5), weights);
    EXPECT_TRUE(at::allclose(got, loss, 1e-5, 1e-5));
    const auto grads = torch::autograd::grad({got}, {own_x, own_w});
    world->all_reduce(grads[0], ReduceOp::kSum).wait();  // sum over the ranks' parts of the head
    EXPECT_TRUE(at::allclose(grads[0], wanted[0], 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(grads[1], wanted[1].narrow(0, world->rank() * 50, 50), 1e-4, 1e-5));
  });
}

TEST(HeadOutputs, NeverHasAllLogits) {
  MEGASHARD_NOT_ON_SIM("it counts what the CPU's allocator gives");
  auto& allocator = *new testing::CountingAllocator;
  const HeadQuestion question{at::randint(0, 4096, {256}, at::kLong), true, at::randint(0, 4096, {8, 256}, at::kLong)};
  const auto x = at::randn({256, 8}).requires_grad_(), w = at::randn({4096, 8}).requires_grad_();
  const auto before = allocator.live();
  allocator.reset_peak();
  const auto outputs = linear_head_outputs(x, w, question, nullptr, 16 * 4096);
  (outputs.losses.sum() + outputs.entropies.sum() + outputs.log_probs.sum()).backward();
  const auto peak = allocator.peak() - before;
  allocator.stop();
  EXPECT_LT(peak, 256 * 4096 * 4 / 2);  // of all; 16 tokens take a sixteenth, of which backward has some copies
}

}  // namespace
}  // namespace megashard
