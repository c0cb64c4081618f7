#include "models/moe/router.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "framework/modules/multi_modal_module.h"

namespace megashard {
namespace {

constexpr int64_t kHidden = 6, kExperts = 4;

std::shared_ptr<Router> balancing_router(double rate, double balance_coef = 0) {
  const auto spec =
      top_k_router("", {.score = RouterConfig::Score::kSigmoid, .corrects_choice = true, .bias_update_rate = rate});
  MoeConfig config{.num_experts = kExperts, .experts_per_token = 1, .balance_coef = balance_coef};
  auto router = spec->build(kHidden, config);
  router->module()->to(at::empty({0}).device());
  return router;
}

at::Tensor correction_of(Router& router) { return router.module()->named_buffers()["e_score_correction_bias"]; }

TEST(Router, MovesItsCorrectionAgainstTheLoad) {
  const auto router = balancing_router(0.25);
  router->module()->named_parameters()["weight"].detach().zero_();  // all scores are alike
  const auto correction = correction_of(*router);
  correction.copy_(at::tensor({0.0, 0.0, 3.0, 0.0}));
  const auto tokens = at::randn({5, kHidden});
  const auto routing = router->route(tokens, {}, 1);
  EXPECT_TRUE(routing.experts.eq(2).all().item<bool>());
  EXPECT_TRUE(routing.weights.eq(0.5).all().item<bool>()) << "weights are the scores, without the correction";

  auto* ends = dynamic_cast<EndsSteps*>(router->module().get());
  ASSERT_NE(ends, nullptr);
  router->route(tokens, {}, 1);  // two micro batches of a step
  const auto counts = ends->take_counts();
  EXPECT_TRUE(counts.cpu().equal(at::tensor({0.0F, 0.0F, 10.0F, 0.0F}))) << counts;
  EXPECT_TRUE(ends->take_counts().eq(0).all().item<bool>()) << "a step has its own counts";
  ends->end_step(counts);
  EXPECT_TRUE(correction.cpu().equal(at::tensor({0.25F, 0.25F, 2.75F, 0.25F}))) << correction;
}

TEST(Router, CountsNothingInEvaluations) {
  const auto router = balancing_router(0.25);
  router->module()->named_parameters()["weight"].detach().zero_();
  correction_of(*router).zero_();
  router->module()->eval();
  router->route(at::randn({5, kHidden}), {}, 1);
  EXPECT_TRUE(dynamic_cast<EndsSteps&>(*router->module()).take_counts().eq(0).all().item<bool>());
}

TEST(Router, BalancesProbabilitiesWithoutTheCorrection) {
  const at::NoGradGuard no_grad;
  const auto router = balancing_router(0, /*balance_coef=*/1);
  router->module()->named_parameters()["weight"].normal_();
  correction_of(*router).copy_(at::tensor({0.0, 0.0, 3.0, 0.0}));
  const auto balance = router->route(at::randn({50, kHidden}), {}, 1).balance;  // [2, 1, experts]
  EXPECT_LT(balance[0][0][2].item<double>(), 50) << "Megatron counts the experts of the largest scores";
  EXPECT_NEAR(balance[1].sum().item<double>(), 50, 1e-4) << "each token's probabilities add up to 1";
}

TEST(Router, WithoutARateItsCorrectionStays) {
  const auto router = balancing_router(0);
  EXPECT_EQ(dynamic_cast<EndsSteps*>(router->module().get()), nullptr) << "and costs no all-reduce";
}

}  // namespace
}  // namespace megashard
