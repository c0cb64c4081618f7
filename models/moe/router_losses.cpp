#include "models/moe/router_losses.h"

#include <ATen/TensorOperators.h>

namespace megashard {
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
