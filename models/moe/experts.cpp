#include "models/moe/experts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "models/kernels/grouped_linear.h"
#include "models/layers/low_rank_adapter.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {
namespace {

constexpr const char* kNames[] = {"gate_proj", "up_proj", "down_proj"};

/// fp8 scales are those of one matrix, so there is a product for each expert.
at::Tensor float8_products(const at::Tensor& rows, const at::Tensor& weight, RowGroups& groups,
                           const Float8Options& options) {
  auto pieces = rows.split_with_sizes(groups.on_host());
  const auto matrices = weight.unbind(0);
  for (size_t i = 0; i < pieces.size(); ++i) pieces[i] = float8_linear(pieces[i], matrices[i], {}, options);
  return at::cat(pieces);
}

}  // namespace

Experts::Experts(const MlpSpec& spec, int64_t num_experts, std::string class_name, const BuildContext& context)
    : class_name_(std::move(class_name)),
      spec_(spec),
      num_experts_(num_experts),
      placement_(context.experts),
      tensor_parallel_(context.tensor_parallel) {
  TORCH_CHECK(!spec.bias, "experts have no biases");
  const int64_t own = num_experts / placement_.ranks;
  const int64_t channels = spec.intermediate_size / tensor_parallel_->size();
  up_ = spec.gated ? register_parameter("gate_up_proj", at::empty({own, 2, channels, spec.hidden_size}))
                   : register_parameter("up_proj", at::empty({own, channels, spec.hidden_size}));
  down_ = register_parameter("down_proj", at::empty({own, spec.hidden_size, channels}));
}

at::Tensor Experts::weight_of(Index projection) const {
  if (projection == kDown) return down_;
  return spec_.gated ? up_.select(1, projection) : up_;
}

std::vector<Experts::Projection> Experts::projections() const {
  std::vector<Projection> all;
  for (const Index each : {kGate, kUp, kDown}) {
    if (each == kGate && !spec_.gated) continue;
    all.push_back({kNames[each], weight_of(each), adapters_[each] ? &*adapters_[each] : nullptr});
  }
  return all;
}

std::vector<Experts::Projection> Experts::projections_of(const at::Tensor& parameter) const {
  auto all = projections();
  if (parameter.is_same(down_)) return {all.back()};
  all.pop_back();
  return all;
}

at::Tensor Experts::forward(const at::Tensor& rows, const RowGroupsPtr& groups) {
  if (is_plain()) {
    const auto wide = grouped_linear(rows, up_, groups);
    const bool is_swiglu = wide.size() == 2 && spec_.activation == Activation::kSilu;
    if (is_swiglu) return grouped_swiglu_linear(wide[0], wide[1], down_, groups);
    return grouped_linear(activated(wide, spec_.activation), down_, groups)[0];
  }
  std::vector<at::Tensor> wide;
  if (spec_.gated) wide.push_back(project(kGate, rows, groups));
  wide.push_back(project(kUp, rows, groups));
  return project(kDown, activated(wide, spec_.activation), groups);
}

at::Tensor Experts::project(Index projection, const at::Tensor& rows, const RowGroupsPtr& groups) const {
  const auto weight = weight_of(projection);
  const auto results =
      float8_ ? float8_products(rows, weight, *groups, *float8_) : grouped_linear(rows, weight, groups)[0];
  const auto& adapter = adapters_[projection];
  if (!adapter) return results;
  const bool drops = is_training() && adapter->dropout > 0;
  const auto inputs = drops ? at::dropout(rows, adapter->dropout, /*train=*/true) : rows;
  const auto narrow = grouped_linear(inputs, adapter->lora_a, groups)[0];
  return at::add(results, grouped_linear(narrow, adapter->lora_b, groups)[0], adapter->scale);
}

void Experts::add_adapters(const std::vector<std::string>& projections, int64_t rank, double scale, double dropout) {
  for (const auto& [name, weight, _] : this->projections()) {
    if (std::ranges::find(projections, name) == projections.end()) continue;
    const auto options = weight.options().requires_grad(false);
    const auto lora_a = at::empty({weight.size(0), rank, weight.size(2)}, options);
    const auto lora_b = at::zeros({weight.size(0), weight.size(1), rank}, options);
    adapters_[std::ranges::find(kNames, std::string_view(name)) - kNames] = {lora_a, lora_b, scale, dropout};
    const auto adapter = register_module(name, std::make_shared<torch::nn::Module>());
    for (const auto& [child, values] : {std::pair("lora_A", lora_a), std::pair("lora_B", lora_b)}) {
      const auto layer = adapter->register_module(child, std::make_shared<torch::nn::Module>());
      layer->register_parameter("weight", values);
    }
  }
  const at::NoGradGuard no_grad;
  for (int64_t i = 0, own = 0; i < num_experts_; ++i) {
    const bool mine = placement_.has(i, num_experts_);
    for (const auto& adapter : adapters_) {
      if (!adapter) continue;
      const auto& all = adapter->lora_a;
      const auto weight = mine ? all.select(0, own) : at::empty(all.sizes().slice(1), all.options());
      const double bound = lora_init_bound(all.size(2));
      weight.uniform_(-bound, bound);
    }
    own += mine;
  }
}

void Experts::declare_cut(const DeviceMeshPtr& mesh) {
  if (tensor_parallel_->size() == 1) return;
  set_tensor_parallel(up_, mesh, Placement::shard(up_.dim() - 2));
  set_tensor_parallel(down_, mesh, Placement::shard(2));
}

/// Draws expert by expert, as if each had three linear layers.
void Experts::init_own_weights(const WeightInit& init) {
  const int64_t channels = spec_.intermediate_size, hidden = spec_.hidden_size;
  for (int64_t i = 0, own = 0; i < num_experts_; ++i) {
    const bool mine = placement_.has(i, num_experts_);
    for (int64_t part = 0; part < (spec_.gated ? 2 : 1); ++part) {
      at::Tensor weight;
      if (mine) weight = spec_.gated ? up_.select(0, own).select(0, part) : up_.select(0, own);
      draw_weight(weight, {channels, hidden}, 0, *tensor_parallel_, init.std, init);
    }
    draw_weight(mine ? down_.select(0, own) : at::Tensor(), {hidden, channels}, 1, *tensor_parallel_,
                init.std * spec_.output_init_scale, init);
    own += mine;
  }
}

}  // namespace megashard
