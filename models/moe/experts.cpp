#include "models/moe/experts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "models/kernels/grouped_linear.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {
namespace {

struct Builder {
  const std::string& path;
  const ExpertSizes& sizes;
  const ExpertFiles& names;

  std::string up() const { return path + (sizes.gated ? "gate_up_proj" : "up_proj"); }
  std::string down() const { return path + "down_proj"; }

  StoredForm separate() const {
    const auto [experts, hidden, intermediate, gated, bias] = sizes;
    StoredForm form{"separate", {}};
    for (int64_t e = 0; e < experts; ++e) {
      const auto weight = [&](const std::string& name) { return path + std::to_string(e) + "." + name + ".weight"; };
      const std::vector<int64_t> wide{intermediate, hidden};
      if (gated) form.parts.push_back(indexed_part(up(), {e, 0}, weight(names.gate), wide));
      form.parts.push_back(
          indexed_part(up(), gated ? std::vector{e, int64_t{1}} : std::vector{e}, weight(names.up), wide));
      form.parts.push_back(indexed_part(down(), {e}, weight(names.down), {hidden, intermediate}));
    }
    return form;
  }

  StoredForm packed() const {
    const auto [experts, hidden, intermediate, gated, bias] = sizes;
    auto wide = gated ? whole_part(up(), up(), {experts, 2 * intermediate, hidden}, {experts, 2, intermediate, hidden})
                      : whole_part(up(), up(), {experts, intermediate, hidden});
    return {"packed", {std::move(wide), whole_part(down(), down(), {experts, hidden, intermediate})}};
  }

  StoredForm interleaved() const {
    const auto [experts, hidden, intermediate, gated, bias] = sizes;
    const std::vector<int64_t> narrow{experts, intermediate, hidden};
    StoredForm form{
        "interleaved",
        {whole_part(up(), up(), {experts, hidden, 2 * intermediate}, {experts, hidden, intermediate, 2}, {0, 3, 2, 1}),
         whole_part(down(), down(), narrow, narrow, {0, 2, 1})}};
    if (!bias) return form;
    form.parts.push_back(
        whole_part(up() + "_bias", up() + "_bias", {experts, 2 * intermediate}, {experts, intermediate, 2}, {0, 2, 1}));
    return form;
  }

  StoredForm transposed() const {
    const auto [experts, hidden, intermediate, gated, bias] = sizes;
    const std::vector<int64_t> narrow{experts, intermediate, hidden}, wide{experts, hidden, intermediate};
    auto up_part = gated ? whole_part(up(), up(), {experts, hidden, 2 * intermediate},
                                      {experts, hidden, 2, intermediate}, {0, 2, 3, 1})
                         : whole_part(up(), up(), wide, wide, {0, 2, 1});
    return {"transposed", {std::move(up_part), whole_part(down(), down(), narrow, narrow, {0, 2, 1})}};
  }
};

}  // namespace

WeightGroup expert_forms(const std::string& path, const ExpertSizes& sizes, const ExpertFiles& published) {
  const Builder builder{path, sizes, published};
  const auto [experts, hidden, intermediate, gated, bias] = sizes;
  const std::vector<int64_t> up =
      gated ? std::vector{experts, int64_t{2}, intermediate, hidden} : std::vector{experts, intermediate, hidden};
  WeightGroup group{{{builder.up(), up}, {builder.down(), {experts, hidden, intermediate}}}, {}};
  if (published.form == ExpertFiles::Form::kInterleaved) {  // their sizes are the transposed form's
    if (bias) group.tensors.push_back({builder.up() + "_bias", {experts, 2, intermediate}});
    group.forms.push_back(builder.interleaved());
    return group;
  }
  if (published.only && published.form == ExpertFiles::Form::kTransposed) {
    group.forms.push_back(builder.transposed());
    return group;
  }
  group.forms = {builder.packed(), builder.transposed(), builder.separate()};
  const bool is_square = hidden == (gated ? 2 : 1) * intermediate || hidden == intermediate;
  const auto form =
      published.form == ExpertFiles::Form::kTransposed && is_square ? ExpertFiles::Form::kPacked : published.form;
  const auto first = group.forms.begin() + static_cast<std::ptrdiff_t>(form);
  std::rotate(group.forms.begin(), first, first + 1);
  return group;
}

namespace {

constexpr const char* kNames[] = {"gate_proj", "up_proj", "down_proj"};

at::Tensor products_one_by_one(const at::Tensor& rows, const at::Tensor& weight, RowGroups& groups,
                               LinearCompute& compute) {
  auto pieces = rows.split_with_sizes(groups.on_host());
  const auto matrices = weight.unbind(0);
  for (size_t i = 0; i < pieces.size(); ++i) pieces[i] = compute.forward(pieces[i], matrices[i], {});
  return at::cat(pieces);
}

}  // namespace

Experts::Experts(const MlpSpec& spec, int64_t num_experts, std::string class_name, const BuildContext& context)
    : class_name_(std::move(class_name)),
      spec_(spec),
      num_experts_(num_experts),
      placement_(context.experts),
      tensor_parallel_(context.tensor_parallel) {
  const int64_t own = num_experts / placement_.ranks;
  const int64_t channels = spec.intermediate_size / tensor_parallel_->size();
  up_ = spec.gated ? register_parameter("gate_up_proj", at::empty({own, 2, channels, spec.hidden_size}))
                   : register_parameter("up_proj", at::empty({own, channels, spec.hidden_size}));
  down_ = register_parameter("down_proj", at::empty({own, spec.hidden_size, channels}));
  if (!spec.bias) return;
  up_bias_ = spec.gated ? register_parameter("gate_up_proj_bias", at::empty({own, 2, channels}))
                        : register_parameter("up_proj_bias", at::empty({own, channels}));
  down_bias_ = register_parameter("down_proj_bias", at::empty({own, spec.hidden_size}));
}

at::Tensor Experts::weight_of(Index projection) const {
  if (projection == kDown) return down_;
  return spec_.gated ? up_.select(1, projection) : up_;
}

std::vector<LinearLayers::Layer> Experts::linear_layers() const {
  std::vector<Layer> all;
  for (const Index each : {kGate, kUp, kDown}) {
    if (each == kGate && !spec_.gated) continue;
    const char* parameter = each != kDown && spec_.gated ? "gate_up_proj" : kNames[each];
    all.push_back(
        {kNames[each], parameter, each == kDown ? down_ : up_, adapters_[each] ? &*adapters_[each] : nullptr});
  }
  return all;
}

at::Tensor Experts::forward(const at::Tensor& rows, const RowGroupsPtr& groups) {
  if (is_plain()) {
    auto wide = grouped_linear(rows, up_, groups);
    if (spec_.is_swiglu() && !spec_.bias) return grouped_swiglu_linear(wide[0], wide[1], down_, groups);
    for (size_t i = 0; i < wide.size(); ++i)
      wide[i] = with_bias(spec_.gated ? static_cast<Index>(i) : kUp, wide[i], groups);
    return with_bias(kDown, grouped_linear(activated(wide, spec_), down_, groups)[0], groups);
  }
  std::vector<at::Tensor> wide;
  if (spec_.gated) wide.push_back(project(kGate, rows, groups));
  wide.push_back(project(kUp, rows, groups));
  return project(kDown, activated(wide, spec_), groups);
}

at::Tensor Experts::project(Index projection, const at::Tensor& rows, const RowGroupsPtr& groups) const {
  const auto weight = weight_of(projection);
  const auto results = with_bias(projection,
                                 compute_ == nullptr ? grouped_linear(rows, weight, groups)[0]
                                                     : products_one_by_one(rows, weight, *groups, *compute_),
                                 groups);
  const auto& adapter = adapters_[projection];
  if (!adapter || !uses_adapters()) return results;
  const bool drops = is_training() && adapter->dropout > 0;
  const auto inputs = drops ? at::dropout(rows, adapter->dropout, /*train=*/true) : rows;
  const auto narrow = grouped_linear(inputs, adapter->lora_a, groups)[0];
  return at::add(results, grouped_linear(narrow, adapter->lora_b, groups)[0], adapter->scale);
}

at::Tensor Experts::with_bias(Index projection, const at::Tensor& results, const RowGroupsPtr& groups) const {
  if (!spec_.bias) return results;
  const auto bias = projection == kDown ? down_bias_ : spec_.gated ? up_bias_.select(1, projection) : up_bias_;
  const auto expert = at::searchsorted(groups->ends(), at::arange(results.size(0), groups->ends().options()),
                                       /*out_int32=*/false, /*right=*/true);
  return results + bias.index_select(0, expert);
}

void Experts::add_adapters(const std::vector<std::string>& names, int64_t rank, double scale, double dropout) {
  for (const Index each : {kGate, kUp, kDown}) {
    const char* name = kNames[each];
    if (std::ranges::find(names, name) == names.end()) continue;
    const auto weight = weight_of(each);
    const auto options = weight.options().requires_grad(false);
    const auto lora_a = at::empty({weight.size(0), rank, weight.size(2)}, options);
    const auto lora_b = at::zeros({weight.size(0), weight.size(1), rank}, options);
    adapters_[each] = {lora_a, lora_b, scale, dropout};
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
  if (!spec_.bias) return;
  up_bias_.zero_();
  down_bias_.zero_();
}

}  // namespace megashard
