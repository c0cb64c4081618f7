#include "models/lora/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/files/output_file.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/weights/published_tensors.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/modules/wrap_policy.h"
#include "models/layers/linear_layers.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

std::string last_name(const std::string& path) { return path.substr(path.rfind('.') + 1); }

/// The name of a layer in PEFT's target_modules: its last name, with that of its list for an entry ("to_out.0").
std::string target_name(const std::string& path) {
  const auto last = last_name(path);
  const bool is_entry = last.find_first_not_of("0123456789") == std::string::npos;
  if (!is_entry || last.size() == path.size()) return last;
  return last_name(path.substr(0, path.size() - last.size() - 1)) + "." + last;
}

/// PEFT's rule.
bool is_target(const std::string& path, const std::string& target) {
  return path == target || path.ends_with("." + target);
}

std::string path_of(const std::string& module, const std::string& layer) {
  return layer.empty() ? module : module + "." + layer;
}

/// True for a layer of several experts.
bool is_stack(const LinearLayers::Layer& layer) { return layer.weight.dim() > 2; }

template <class Visit>
void for_each_module(const torch::nn::Module& model, const Visit& visit) {
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (auto* module = dynamic_cast<LinearLayers*>(item.value().get())) visit(item.key(), *module);
  }
}

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
ShardedTensor merged(const std::string& name, const LinearLayers::Layer& layer) {
  const auto& adapter = *layer.adapter;
  auto piece = reshard_and_view(layer.weight);
  const auto narrow = reshard_and_view(adapter.lora_b);
  TORCH_CHECK(piece.offsets[0] == narrow.offsets[0] && piece.local.size(0) == narrow.local.size(0), name,
              " and its adapter are cut into other rows, so they cannot be merged: make them one unit of fully_shard");
  const auto wide = full_tensor(reshard_and_view(adapter.lora_a)).to(at::kFloat);
  const auto product = at::mm(narrow.local.detach().to(at::kFloat), wide) * adapter.scale;
  piece.local = (piece.local.detach().to(at::kFloat) + product).to(piece.local.scalar_type());
  return piece;
}

/// As above, of one parameter of all experts [E, halves, out, in] or [E, out, in], whose halves have the adapters.
ShardedTensor merged(const std::vector<LinearLayers::Layer>& halves) {
  auto piece = reshard_and_view(halves.front().weight);
  piece.local = piece.local.detach().clone();
  const auto& begin = piece.offsets;
  const auto local = piece.local.dim() == 4 ? piece.local : piece.local.unsqueeze(1);
  const bool has_halves = piece.local.dim() == 4;
  const int64_t first_half = has_halves ? begin[1] : 0, first_row = begin[has_halves ? 2 : 1];
  for (size_t half = 0; half < halves.size(); ++half) {
    const auto* adapter = halves[half].adapter;
    if (adapter == nullptr) continue;
    const auto lora_a = full_tensor(reshard_and_view(adapter->lora_a)).to(at::kFloat);
    const auto lora_b = full_tensor(reshard_and_view(adapter->lora_b)).to(at::kFloat);
    const int64_t own_half = static_cast<int64_t>(half) - first_half;
    if (own_half < 0 || own_half >= local.size(1)) continue;
    for (int64_t i = 0; i < local.size(0); ++i) {
      auto rows = local.select(0, i).select(0, own_half);
      const auto narrow = lora_b.select(0, begin[0] + i).narrow(0, first_row, rows.size(0));
      const auto product = at::mm(narrow, lora_a.select(0, begin[0] + i)) * adapter->scale;
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
    known.insert(target_name(path));
    const auto matches = [&](const std::string& target) { return is_target(path, target); };
    std::erase_if(missing, matches);
    return std::ranges::any_of(wanted, matches) || (all && !is_output_projection(path));
  };
  const double scale = options.alpha / static_cast<double>(options.rank);
  for_each_module(model, [&](const std::string& path, LinearLayers& module) {
    if (is_lora_parameter(path + ".")) return;
    std::vector<std::string> names;
    for (const auto& layer : module.linear_layers()) {
      const auto name = path_of(path, layer.name);
      if (!is_wanted(name)) continue;
      TORCH_CHECK(!tied.contains(layer.weight.unsafeGetTensorImpl()), "--lora-target-modules: ", name,
                  " shares its weight with the embeddings, which an adapter would not change: leave ",
                  target_name(name),
                  " out, or untie them: \"tie_word_embeddings\": false in config.json, or for a network of flags "
                  "--untie-embeddings-and-output-weights");
      names.push_back(layer.name);
      count += is_stack(layer) ? layer.weight.size(0) : 1;
    }
    module.add_adapters(names, options.rank, scale, options.dropout);
  });
  TORCH_CHECK(missing.empty(), "--lora-target-modules: the model has no linear layer ",
              listed({missing.begin(), missing.end()}), "; it has ", listed({known.begin(), known.end()}));
  model.keep_trained_only();
  return count;
}

void add_adapter_forms(const torch::nn::Module& model, WeightMap& map) {
  for_each_module(model, [&](const std::string& path, const LinearLayers& module) {
    for (const auto& layer : module.linear_layers()) {
      if (layer.adapter == nullptr || !is_stack(layer)) continue;
      for (const auto& [end, matrices] :
           {std::pair(".lora_A.weight", layer.adapter->lora_a), std::pair(".lora_B.weight", layer.adapter->lora_b)}) {
        const auto sizes = global_sizes(matrices);
        const auto name = path + "." + layer.name + end;
        StoredForm form{"separate", {}};
        for (int64_t e = 0; e < sizes.front(); ++e) {
          const auto stored = path + "." + std::to_string(e) + "." + layer.name + end;
          form.parts.push_back(indexed_part(name, {e}, stored, {sizes.begin() + 1, sizes.end()}));
        }
        map.groups.push_back({{{name, sizes}}, {std::move(form)}});
      }
    }
  });
}

ShardedTensors merged_state_dict(MegatronModule& model) {
  const at::NoGradGuard no_grad;
  std::unordered_map<std::string, std::vector<LinearLayers::Layer>> adapted;  // by parameter, all of its layers
  for_each_module(model, [&](const std::string& path, const LinearLayers& module) {
    for (const auto& layer : module.linear_layers()) adapted[path + "." + layer.parameter].push_back(layer);
  });
  std::erase_if(adapted, [](const auto& each) {
    return std::ranges::all_of(each.second, [](const auto& layer) { return layer.adapter == nullptr; });
  });
  ShardedTensors tensors;
  for (auto& [name, piece] : model.whole_state_dict()) {
    if (is_lora_parameter(name)) continue;
    const auto found = adapted.find(name);
    if (found == adapted.end()) {
      tensors.emplace_back(name, piece);
    } else if (const auto& layers = found->second; is_stack(layers.front())) {
      tensors.emplace_back(name, merged(layers));
    } else {
      tensors.emplace_back(name, merged(name, layers.front()));
    }
  }
  return tensors;
}

namespace {

/// A whole number without a point, as PEFT has it.
nlohmann::ordered_json number(double value) {
  if (value == std::floor(value)) return static_cast<int64_t>(value);
  return value;
}

}  // namespace

HfWeights adapter_weights(MegatronModule& model, const Arguments& arguments) {
  std::set<std::string> targets;
  HfWeights weights;
  for (auto& [name, piece] : published_tensors(checked_state_dict(model), model.weight_map())) {
    if (!is_lora_parameter(name)) continue;
    targets.insert(target_name(name.substr(0, name.rfind(".lora_"))));
    weights.tensors.emplace_back("base_model.model." + name, std::move(piece));
  }
  const auto* multi_modal = dynamic_cast<const MultiModalModule*>(&model);
  const bool writes_text = multi_modal == nullptr || !multi_modal->latent_patches();
  const nlohmann::ordered_json task = writes_text ? nlohmann::ordered_json("CAUSAL_LM") : nullptr;
  const nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                         {"task_type", task},
                                         {"base_model_name_or_path", *arguments.hf_model},
                                         {"r", *arguments.lora_r},
                                         {"lora_alpha", number(arguments.lora_alpha)},
                                         {"lora_dropout", arguments.lora_dropout},
                                         {"target_modules", targets},
                                         {"bias", "none"},
                                         {"fan_in_fan_out", false},
                                         {"modules_to_save", nullptr},
                                         {"inference_mode", true}};
  weights.files = {.max_shard_bytes = std::numeric_limits<int64_t>::max(),  // PEFT reads one file
                   .stem = "adapter_model",
                   .beside = [text = config.dump(2) + "\n"](const std::string& folder) {
                     write_file_atomically(folder + "/adapter_config.json", text);
                   }};
  return weights;
}

}  // namespace megashard
