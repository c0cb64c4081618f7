#include "models/moe/router.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "framework/modules/multi_modal_module.h"
#include "models/kernels/fused_ops.h"
#include "parallel/fsdp/recompute_scope.h"

namespace megashard {
namespace {

/// Routing's balance from the router's probabilities and experts; with `by_own_softmax` from a softmax in the logits'
/// dtype and its largest.
at::Tensor balance_of(const at::Tensor& logits, at::Tensor probabilities, at::Tensor experts, const at::Tensor& mask,
                      int64_t sequences, bool by_own_softmax) {
  if (by_own_softmax) {
    const auto own = at::softmax(logits, -1);
    experts = std::get<1>(at::topk(own, experts.size(1), -1));
    probabilities = own.to(at::kFloat);
  }
  const int64_t tokens = logits.size(0), num_experts = logits.size(1);
  auto counts = at::zeros({sequences * num_experts}, logits.options().dtype(at::kFloat));
  auto each = at::ones_like(experts, counts.options());
  if (mask.defined()) {
    each = each * mask.unsqueeze(1);
    probabilities = probabilities * mask.unsqueeze(1);
  }
  if (sequences > 1) {
    const auto sequence = at::arange(tokens, experts.options()).div(tokens / sequences, "floor");
    experts = experts + (sequence * num_experts).unsqueeze(1);
  }
  counts.scatter_add_(0, experts.flatten(), each.flatten());
  return at::stack({counts.view({sequences, num_experts}), probabilities.view({sequences, -1, num_experts}).sum(1)});
}

at::Tensor squared_sums(const at::Tensor& logits, const at::Tensor& mask) {
  const auto squares = at::logsumexp(logits.to(at::kFloat), -1).square();
  return (mask.defined() ? squares * mask : squares).sum();
}

/// scores [N, experts], with those of the groups that are not chosen replaced.
at::Tensor within_groups(const at::Tensor& scores, const RouterConfig& config) {
  const auto by_group = scores.view({scores.size(0), config.groups, -1});
  const auto best = std::min(config.best_of_group, by_group.size(2));
  const auto of_groups = best == 1 ? by_group.amax(-1) : std::get<0>(at::topk(by_group, best, -1)).sum(-1);
  const auto chosen = std::get<1>(at::topk(of_groups, config.chosen_groups, -1));
  const auto others = at::ones_like(of_groups, at::kBool).scatter_(1, chosen, false);
  const double score = config.others_score_zero ? 0 : -std::numeric_limits<double>::infinity();
  return by_group.masked_fill(others.unsqueeze(-1), score).flatten(1);
}

class TopKRouter : public torch::nn::Module, public SelfInitializing {
 public:
  TopKRouter(std::string class_name, RouterConfig router, int64_t hidden_size, MoeConfig config)
      : class_name_(std::move(class_name)), router_(router), config_(std::move(config)) {
    weight_ = register_parameter("weight", at::empty({config_.num_experts, hidden_size}));
    if (router_.bias) bias_ = register_parameter("bias", at::empty({config_.num_experts}));
    if (router_.corrects_choice)
      correction_ = register_buffer("e_score_correction_bias", at::zeros({config_.num_experts}));
  }

  Routing forward(const at::Tensor& tokens, const at::Tensor& mask, int64_t sequences) {
    const auto logits = router_.in_fp32 ? linear(tokens.to(at::kFloat), weight_.to(at::kFloat), at::Tensor())
                                        : linear(tokens, weight_, bias_);
    const auto scores = scores_of(logits);
    auto [weights, experts] = chosen(scores);
    if (router_.score == RouterConfig::Score::kLogit) weights = at::softmax(weights, -1);
    if (router_.normalise_weights) weights = weights / (weights.sum(-1, /*keepdim=*/true) + router_.normalise_eps);
    if (router_.scale != 1) weights = weights * router_.scale;
    const auto [probabilities, loads] = balanced(logits, scores, experts);
    auto losses = router_statistics(config_, is_training(), logits, probabilities, loads, mask, sequences);
    return {router_.in_fp32 ? weights : weights.to(logits.scalar_type()), experts, std::move(losses.balance),
            std::move(losses.z)};
  }
  void init_own_weights(const WeightInit& init) override {
    weight_.normal_(0, init.std, init.generator);
    if (bias_.defined()) bias_.zero_();
  }
  std::string class_name() const { return class_name_; }

 protected:
  at::Tensor correction_;  // [experts] fp32; undefined: none
  RouterConfig router_config() const { return router_; }

 private:
  at::Tensor scores_of(const at::Tensor& logits) const {
    switch (router_.score) {
      case RouterConfig::Score::kSoftmax:
        return at::softmax(logits, -1, at::kFloat);
      case RouterConfig::Score::kSigmoid:
        return at::sigmoid(logits.to(at::kFloat));
      case RouterConfig::Score::kLogit:
        break;
    }
    return logits;
  }

  /// What Megatron's losses balance (compute_routing_scores_for_aux_loss): probabilities [N, experts] and their K
  /// largest, without groups and correction.
  std::pair<at::Tensor, at::Tensor> balanced(const at::Tensor& logits, const at::Tensor& scores,
                                             const at::Tensor& experts) const {
    using Score = RouterConfig::Score;
    const bool is_plain = router_.score == Score::kSoftmax && !correction_.defined() && router_.groups == 1;
    if (is_plain || !config_.has_megatron_losses()) return {scores, experts};
    auto probabilities = scores;
    if (router_.score == Score::kSigmoid) probabilities = scores / (scores.sum(-1, /*keepdim=*/true) + 1e-20);
    if (router_.score == Score::kLogit) probabilities = at::softmax(logits, -1, at::kFloat);
    return {probabilities, std::get<1>(at::topk(probabilities, config_.experts_per_token, -1))};
  }

  /// Scores and indices [N, K] of each token's experts.
  std::pair<at::Tensor, at::Tensor> chosen(const at::Tensor& scores) const {
    const bool by_scores = !correction_.defined() && router_.groups == 1;
    if (by_scores) {
      auto [values, indices] = at::topk(scores, config_.experts_per_token, -1);
      return {values, indices};
    }
    auto choice = scores.detach();
    if (correction_.defined()) choice = choice + correction_;
    if (router_.groups > 1) choice = within_groups(choice, router_);
    const auto indices = std::get<1>(at::topk(choice, config_.experts_per_token, -1));
    return {scores.gather(1, indices), indices};
  }

  std::string class_name_;
  RouterConfig router_;
  MoeConfig config_;
  at::Tensor weight_;  // [experts, C]
  at::Tensor bias_;    // [experts]; undefined: none
};

/// Moves the correction against each expert's load after every step (Megatron's get_updated_expert_bias).
class BalancingRouter : public TopKRouter, public EndsSteps {
 public:
  using TopKRouter::TopKRouter;

  Routing forward(const at::Tensor& tokens, const at::Tensor& mask, int64_t sequences) {
    auto routing = TopKRouter::forward(tokens, mask, sequences);
    if (is_training() && is_first_forward()) count(routing.experts);
    return routing;
  }
  at::Tensor take_counts() override {
    return counts_.defined() ? std::exchange(counts_, {}) : at::zeros_like(correction_);
  }
  void end_step(const at::Tensor& sums) override {
    correction_.add_((sums.mean() - sums).sign(), router_config().bias_update_rate);
  }

 private:
  void count(const at::Tensor& experts) {
    if (!counts_.defined()) counts_ = at::zeros_like(correction_);
    const auto chosen = experts.flatten();
    counts_.scatter_add_(0, chosen, at::ones_like(chosen, counts_.options()));
  }

  at::Tensor counts_;  // [experts], of this step; undefined: zeros
};

class TopKRouterSpec final : public RouterSpec {
 public:
  TopKRouterSpec(std::string class_name, RouterConfig config) : class_name_(std::move(class_name)), config_(config) {}
  std::shared_ptr<Router> build(int64_t hidden_size, const MoeConfig& config) const override {
    if (config_.corrects_choice && config_.bias_update_rate != 0)
      return std::make_shared<RouterOf<BalancingRouter>>(class_name_, config_, hidden_size, config);
    return std::make_shared<RouterOf<TopKRouter>>(class_name_, config_, hidden_size, config);
  }
  std::string name() const override { return config_.name; }
  std::vector<std::string> names_in_fp32() const override {
    std::vector<std::string> names;
    if (config_.in_fp32) names.emplace_back("weight");
    if (config_.corrects_choice) names.emplace_back("e_score_correction_bias");
    return names;
  }

 private:
  std::string class_name_;
  RouterConfig config_;
};

}  // namespace

RouterStatistics router_statistics(const MoeConfig& config, bool trains, const at::Tensor& logits,
                                   const at::Tensor& probabilities, const at::Tensor& experts, const at::Tensor& mask,
                                   int64_t sequences) {
  const bool as_transformers = config.aux_loss_coef != 0, as_megatron = config.has_megatron_losses() && trains;
  RouterStatistics statistics;
  // transformers' loss has its own softmax, equal to a softmax router's in fp32; Megatron's takes the router's scores.
  const bool is_same = logits.scalar_type() == at::kFloat && config.router.score == RouterConfig::Score::kSoftmax;
  if (as_transformers || as_megatron)
    statistics.balance =
        balance_of(logits, probabilities, experts, mask, sequences, /*by_own_softmax=*/as_transformers && !is_same);
  if (as_megatron && config.z_loss_coef != 0) statistics.z = squared_sums(logits, mask);
  return statistics;
}

RouterSpecPtr top_k_router(std::string class_name, RouterConfig config) {
  return std::make_shared<TopKRouterSpec>(std::move(class_name), config);
}

namespace {

/// Losses [layers] from balance [layers, 2, experts] or [layers, 2, B, experts]; the latter: means over B losses.
at::Tensor balance_of_layers(const at::Tensor& balance, int64_t experts_per_token) {
  const auto counts = balance.select(1, 0), probabilities = balance.select(1, 1);
  const auto tokens = counts.sum(-1) / static_cast<double>(experts_per_token);
  const auto products = (counts * probabilities).sum(-1) / tokens.square().clamp_min(1);
  const auto losses = products * (static_cast<double>(balance.size(-1)) / static_cast<double>(experts_per_token));
  return losses.dim() == 1 ? losses : losses.mean(1);
}

}  // namespace

at::Tensor load_balancing_loss(const at::Tensor& balance, int64_t experts_per_token) {
  const auto all = balance.sum(at::IntArrayRef{0, 2});
  const auto tokens = all[0].sum() / static_cast<double>(experts_per_token);
  const auto shares = all / tokens.clamp_min(1);
  return (shares[0] * shares[1]).sum() * static_cast<double>(all.size(1));
}

std::vector<AuxTerm> router_losses(const LayerOutput& states, const MoeConfig& config) {
  const auto& balance = states.balance;
  std::vector<AuxTerm> terms;
  const auto add = [&](const char* name, const at::Tensor& of_layers, double coefficient) {
    terms.push_back(
        {.name = name, .value = of_layers.sum() * coefficient, .metric = of_layers.detach().mean().to(at::kDouble)});
  };
  if (config.z_loss_coef != 0 && states.z.defined()) {
    const auto tokens = balance.select(1, 0).sum(at::IntArrayRef{1, 2}) / static_cast<double>(config.experts_per_token);
    add("z_loss", states.z / tokens.clamp_min(1), config.z_loss_coef);
  }
  if (config.balance_coef != 0) {
    const bool by_sequence = config.balances_sequences;
    add(by_sequence ? "seq_load_balancing_loss" : "load_balancing_loss",
        balance_of_layers(by_sequence ? balance : balance.sum(2), config.experts_per_token), config.balance_coef);
  }
  if (config.aux_loss_coef != 0)
    add("load_balancing_loss", load_balancing_loss(balance, config.experts_per_token), config.aux_loss_coef);
  return terms;
}

}  // namespace megashard
