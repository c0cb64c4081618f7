#include "models/moe/grouped_experts.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <utility>

#include "models/kernels/grouped_linear.h"
#include "models/layers/joint_linears.h"
#include "parallel/fsdp/adjacent_parameters.h"

namespace megashard {
namespace {

using Experts = std::vector<std::shared_ptr<Hooked<Mlp>>>;
using ExpertWeights = std::vector<at::Tensor>;

bool is_plain(const Hooked<Mlp>& expert) {
  const auto plain = [](const auto& layer) { return megashard::is_plain(*layer) && !layer->bias.defined(); };
  return expert.is_transparent() && std::all_of(expert.widening().begin(), expert.widening().end(), plain) &&
         plain(expert.narrowing());
}

/// Weights of gate_proj and up_proj, or of up_proj, expert by expert.
ExpertWeights widening_weights(const Experts& experts) {
  ExpertWeights weights;
  for (const auto& expert : experts) {
    for (const auto& layer : expert->widening()) weights.push_back(layer->weight);
  }
  return weights;
}

ExpertWeights narrowing_weights(const Experts& experts) {
  ExpertWeights weights;
  for (const auto& expert : experts) weights.push_back(expert->narrowing()->weight);
  return weights;
}

/// Every `each`-th of the weights.
ExpertWeights one_each(const ExpertWeights& weights, size_t first, size_t each) {
  ExpertWeights some;
  for (size_t i = first; i < weights.size(); i += each) some.push_back(weights[i]);
  return some;
}

}  // namespace

GroupedExperts::GroupedExperts(Experts experts) : experts_(std::move(experts)) {
  keep_adjacent(widening_weights(experts_));
  keep_adjacent(narrowing_weights(experts_));
}

at::Tensor GroupedExperts::grouped(const at::Tensor& rows, const RowGroupsPtr& groups) const {
  if (!std::all_of(experts_.begin(), experts_.end(), [](const auto& expert) { return is_plain(*expert); })) return {};
  const auto narrowing = narrowing_weights(experts_), widening = widening_weights(experts_);
  if (!can_group(rows, narrowing, groups->size())) return {};
  std::vector<at::Tensor> wide;
  if (can_group(rows, widening, groups->size())) {
    wide = grouped_linear(rows, widening, groups);
  } else if (rows.is_cpu()) {  // not adjacent: a product for gate and one for up
    const size_t each = widening.size() / experts_.size();
    for (size_t i = 0; i < each; ++i) wide.push_back(grouped_linear(rows, one_each(widening, i, each), groups)[0]);
  } else {
    return {};
  }
  if (experts_[0]->is_swiglu()) return grouped_swiglu_linear(wide[0], wide[1], narrowing, groups);
  return grouped_linear(experts_[0]->activated(wide), narrowing, groups)[0];
}

at::Tensor GroupedExperts::forward(const at::Tensor& rows, const RowGroupsPtr& groups) const {
  if (auto results = grouped(rows, groups); results.defined()) return results;
  auto pieces = rows.split_with_sizes(groups->on_host());
  for (size_t i = 0; i < experts_.size(); ++i) pieces[i] = experts_[i]->forward(pieces[i]);
  return at::cat(pieces);
}

}  // namespace megashard
