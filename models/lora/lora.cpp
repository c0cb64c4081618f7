#include "models/lora/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/values/tensor_info.h"
#include "framework/modules/wrap_policy.h"
#include "models/layers/low_rank_adapter.h"
#include "models/moe/experts.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

std::string last_name(const std::string& path) { return path.substr(path.rfind('.') + 1); }

/// Of the weights that several modules have.
std::unordered_set<const c10::TensorImpl*> tied_weights(const torch::nn::Module& model) {
  std::unordered_set<const c10::TensorImpl*> seen, tied;
  for (const auto& item : model.named_parameters()) {
    const auto* weight = item.value().unsafeGetTensorImpl();
    if (!seen.insert(weight).second) tied.insert(weight);
  }
  return tied;
}

/// This rank's part of weight + scale * lora_B lora_A. Collective.
ShardedTensor merged(const std::string& name, const Linear& layer, const LowRankAdapter& adapter) {
  auto piece = reshard_and_view(layer.weight);
  const auto narrow = reshard_and_view(adapter.lora_b());
  TORCH_CHECK(piece.offsets[0] == narrow.offsets[0] && piece.local.size(0) == narrow.local.size(0), name,
              " and its adapter are cut into other rows, so they cannot be merged: make them one unit of fully_shard");
  const auto wide = full_tensor(reshard_and_view(adapter.lora_a())).to(at::kFloat);
  const auto product = at::mm(narrow.local.detach().to(at::kFloat), wide) * adapter.scale();
  piece.local = (piece.local.detach().to(at::kFloat) + product).to(piece.local.scalar_type());
  return piece;
}

/// As above, of one parameter of all experts [E, halves, out, in] or [E, out, in], whose halves have the adapters.
ShardedTensor merged(const at::Tensor& parameter, const std::vector<const Experts::Adapter*>& adapters) {
  auto piece = reshard_and_view(parameter);
  piece.local = piece.local.detach().clone();
  const auto& begin = piece.offsets;
  const auto local = piece.local.dim() == 4 ? piece.local : piece.local.unsqueeze(1);
  const bool has_halves = piece.local.dim() == 4;
  const int64_t first_half = has_halves ? begin[1] : 0, first_row = begin[has_halves ? 2 : 1];
  for (size_t half = 0; half < adapters.size(); ++half) {
    if (adapters[half] == nullptr) continue;
    const auto lora_a = full_tensor(reshard_and_view(adapters[half]->lora_a)).to(at::kFloat);
    const auto lora_b = full_tensor(reshard_and_view(adapters[half]->lora_b)).to(at::kFloat);
    const int64_t own_half = static_cast<int64_t>(half) - first_half;
    if (own_half < 0 || own_half >= local.size(1)) continue;
    for (int64_t i = 0; i < local.size(0); ++i) {
      auto rows = local.select(0, i).select(0, own_half);
      const auto narrow = lora_b.select(0, begin[0] + i).narrow(0, first_row, rows.size(0));
      const auto product = at::mm(narrow, lora_a.select(0, begin[0] + i)) * adapters[half]->scale;
      rows.copy_(rows.to(at::kFloat) + product);
    }
  }
  return piece;
}

}  // namespace

bool is_lora_parameter(const std::string& name) {
  return name.find(".lora_A.") != std::string::npos || name.find(".lora_B.") != std::string::npos;
}

int64_t add_lora(MegatronModule& model, const LoraOptions& options) {
  std::set<std::string> wanted(options.target_modules.begin(), options.target_modules.end());
  const bool all = wanted.erase("all-linear") > 0;
  std::set<std::string> missing = wanted, known;
  for (auto& parameter : model.parameters()) parameter.requires_grad_(false);
  const auto tied = tied_weights(model);
  int64_t count = 0;
  const auto is_wanted = [&](const std::string& path) {
    known.insert(last_name(path));
    if (!wanted.contains(last_name(path)) && (!all || is_output_projection(path))) return false;
    missing.erase(last_name(path));
    return true;
  };
  const double scale = options.alpha / static_cast<double>(options.rank);
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const auto& path = item.key();
    if (auto* layer = dynamic_cast<Linear*>(item.value().get()); layer != nullptr && !is_lora_parameter(path + ".")) {
      if (!is_wanted(path)) continue;
      TORCH_CHECK(!tied.contains(layer->weight.unsafeGetTensorImpl()), "--lora-target-modules: ", path,
                  " shares its weight with the embeddings, which an adapter would not change: leave ", last_name(path),
                  " out, or untie them: \"tie_word_embeddings\": false in config.json, or for a network of flags "
                  "--untie-embeddings-and-output-weights");
      LowRankAdapter::add_to(*layer, options.rank, scale, options.dropout);
      ++count;
    } else if (auto* experts = dynamic_cast<Experts*>(item.value().get())) {
      std::vector<std::string> names;
      for (const auto& projection : experts->projections()) {
        if (!is_wanted(path + "." + projection.name)) continue;
        names.emplace_back(projection.name);
        count += projection.weight.size(0);
      }
      experts->add_adapters(names, options.rank, scale, options.dropout);
    }
  }
  TORCH_CHECK(missing.empty(), "--lora-target-modules: the model has no linear layer ",
              listed({missing.begin(), missing.end()}), "; it has ", listed({known.begin(), known.end()}));
  model.keep_trained_only();
  return count;
}

void add_adapter_forms(const torch::nn::Module& model, WeightMap& map) {
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const auto* experts = dynamic_cast<const Experts*>(item.value().get());
    if (experts == nullptr) continue;
    for (const auto& parameter : experts->named_parameters()) {
      if (!is_lora_parameter(parameter.key())) continue;
      const auto sizes = global_sizes(parameter.value());
      const auto name = item.key() + "." + parameter.key();
      StoredForm form{"separate", {}};
      for (int64_t e = 0; e < sizes.front(); ++e) {
        const auto stored = item.key() + "." + std::to_string(e) + "." + parameter.key();
        form.parts.push_back(indexed_part(name, {e}, stored, {sizes.begin() + 1, sizes.end()}));
      }
      map.groups.push_back({{{name, sizes}}, {std::move(form)}});
    }
  }
}

ShardedTensors merged_state_dict(MegatronModule& model) {
  const at::NoGradGuard no_grad;
  std::unordered_map<std::string, std::function<ShardedTensor()>> adapted;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const auto& path = item.key();
    if (const auto* layer = dynamic_cast<const Linear*>(item.value().get())) {
      const auto* adapter = LowRankAdapter::of(*layer);
      if (adapter == nullptr) continue;
      adapted[path + ".weight"] = [layer, adapter, name = path + ".weight"] { return merged(name, *layer, *adapter); };
    } else if (auto* experts = dynamic_cast<Experts*>(item.value().get())) {
      for (const auto& weight : experts->named_parameters(/*recurse=*/false)) {
        std::vector<const Experts::Adapter*> adapters;
        for (const auto& projection : experts->projections_of(weight.value())) adapters.push_back(projection.adapter);
        if (std::ranges::any_of(adapters, [](const auto* each) { return each != nullptr; }))
          adapted[path + "." + weight.key()] = [=, parameter = weight.value()] { return merged(parameter, adapters); };
      }
    }
  }
  ShardedTensors tensors;
  for (auto& [name, piece] : model.whole_state_dict()) {
    if (is_lora_parameter(name)) continue;
    const auto found = adapted.find(name);
    tensors.emplace_back(name, found == adapted.end() ? piece : found->second());
  }
  return tensors;
}

}  // namespace megashard
