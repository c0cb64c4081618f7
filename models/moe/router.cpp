#include "models/moe/router.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "models/kernels/fused_ops.h"

namespace megashard {
namespace {

/// Routing's balance from the router's probabilities and experts. transformers' loss has its own softmax in the logits'
/// dtype, equal to the router's in fp32; Megatron's uses the router's.
at::Tensor balance_of(const at::Tensor& logits, at::Tensor probabilities, at::Tensor experts, const at::Tensor& mask,
                      int64_t sequences, bool as_transformers) {
  if (logits.scalar_type() != at::kFloat && as_transformers) {
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

/// transformers' Qwen3MoeTopKRouter.
class SoftmaxRouter : public torch::nn::Module, public SelfInitializing {
 public:
  SoftmaxRouter(std::string class_name, int64_t hidden_size, MoeConfig config)
      : class_name_(std::move(class_name)), config_(std::move(config)) {
    weight_ = register_parameter("weight", at::empty({config_.num_experts, hidden_size}));
  }

  Routing forward(const at::Tensor& tokens, const at::Tensor& mask, int64_t sequences) {
    const auto logits = linear(tokens, weight_, at::Tensor());
    const auto probabilities = at::softmax(logits, -1, at::kFloat);
    auto [weights, experts] = at::topk(probabilities, config_.experts_per_token, -1);
    if (config_.normalise_weights) weights = weights / weights.sum(-1, /*keepdim=*/true);
    auto losses = router_statistics(config_, is_training(), logits, probabilities, experts, mask, sequences);
    return {weights.to(logits.scalar_type()), experts, std::move(losses.balance), std::move(losses.z)};
  }
  void init_own_weights(const WeightInit& init) override { weight_.normal_(0, init.std, init.generator); }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  MoeConfig config_;
  at::Tensor weight_;  // [experts, C]
};

class SoftmaxRouterSpec final : public RouterSpec {
 public:
  explicit SoftmaxRouterSpec(std::string class_name) : class_name_(std::move(class_name)) {}
  std::shared_ptr<Router> build(int64_t hidden_size, const MoeConfig& config) const override {
    return std::make_shared<RouterOf<SoftmaxRouter>>(class_name_, hidden_size, config);
  }

 private:
  std::string class_name_;
};

}  // namespace

RouterStatistics router_statistics(const MoeConfig& config, bool trains, const at::Tensor& logits,
                                   const at::Tensor& probabilities, const at::Tensor& experts, const at::Tensor& mask,
                                   int64_t sequences) {
  const bool as_transformers = config.aux_loss_coef != 0, as_megatron = config.has_megatron_losses() && trains;
  RouterStatistics statistics;
  if (as_transformers || as_megatron)
    statistics.balance = balance_of(logits, probabilities, experts, mask, sequences, as_transformers);
  if (as_megatron && config.z_loss_coef != 0) statistics.z = squared_sums(logits, mask);
  return statistics;
}

RouterSpecPtr softmax_router(std::string class_name) {
  return std::make_shared<SoftmaxRouterSpec>(std::move(class_name));
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
