#include "models/moe/router_losses.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <array>
#include <limits>

#include "framework/router_losses.h"

namespace megashard {
namespace {

/// [layers] of each layer's balance [layers, 2, ..., experts] over the dimensions between, each of which has a loss of
/// its own; their mean.
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

MegatronRouterLosses megatron_router_losses(const RoutedStates& states, const MoeConfig& config) {
  const auto& balance = states.balance;
  std::array<at::Tensor, kRouterLosses> losses;  // [layers]
  std::array<double, kRouterLosses> coefficients{};
  const auto add = [&](RouterLoss which, const at::Tensor& of_layers, double coefficient) {
    losses[which] = of_layers;
    coefficients[which] = coefficient;
  };
  if (config.balance_coef != 0) {
    const bool apart = config.balances_sequences;
    add(apart ? kSequenceBalancingLoss : kLoadBalancingLoss,
        balance_of_layers(apart ? balance : balance.sum(2), config.experts_per_token), config.balance_coef);
  }
  if (config.z_loss_coef != 0) {
    const auto tokens = balance.select(1, 0).sum(at::IntArrayRef{1, 2}) / static_cast<double>(config.experts_per_token);
    add(kZLoss, states.z / tokens.clamp_min(1), config.z_loss_coef);
  }
  MegatronRouterLosses result;
  std::vector<at::Tensor> told;
  for (size_t i = 0; i < losses.size(); ++i) {
    const bool is_asked_for = losses[i].defined();
    told.push_back(is_asked_for ? losses[i].detach().mean().to(at::kDouble)
                                : at::full({}, std::numeric_limits<double>::quiet_NaN(),
                                           balance.options().dtype(at::kDouble).requires_grad(false)));
    if (!is_asked_for) continue;
    const auto weighted = losses[i].sum() * coefficients[i];
    result.added = result.added.defined() ? result.added + weighted : weighted;
  }
  result.told = at::stack(told);
  return result;
}

}  // namespace megashard
