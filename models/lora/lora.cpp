#include "models/lora/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/values/tensor_info.h"
#include "framework/modules/wrap_policy.h"
#include "models/layers/linear.h"
#include "models/moe/moe.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

std::string last_name(const std::string& path) { return path.substr(path.rfind('.') + 1); }

/// Calls `visit(path, layer, whether it is of this rank)` for all of the model's linear layers but
/// adapters, those of other ranks' experts too, which live for the call.
template <class Visit>
void visit_linear_layers(torch::nn::Module& model, const Visit& visit) {
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (auto* layer = dynamic_cast<Linear*>(item.value().get())) {
      if (!is_lora_parameter(item.key() + ".")) visit(item.key(), *layer, true);
    } else if (const auto* other = dynamic_cast<RemoteExpert*>(item.value().get())) {
      const auto expert = other->expert();
      for (const auto& child : expert->named_children())
        visit(item.key() + "." + child.key(), dynamic_cast<Linear&>(*child.value()), false);
    }
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

/// This rank's rows of weight + scale * lora_B lora_A.
ShardedTensor merged(const std::string& name, const Linear& layer) {
  auto piece = reshard_and_view(layer.weight);
  const auto narrow = reshard_and_view(layer.lora_b());
  TORCH_CHECK(piece.offsets[0] == narrow.offsets[0] && piece.local.size(0) == narrow.local.size(0), name,
              " and its adapter are cut into other rows, so they cannot be merged: make them one unit of fully_shard");
  const auto wide = full_tensor(reshard_and_view(layer.lora_a())).to(at::kFloat);
  const auto product = at::mm(narrow.local.detach().to(at::kFloat), wide) * layer.adapter_scale();
  piece.local = (piece.local.detach().to(at::kFloat) + product).to(piece.local.scalar_type());
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
  visit_linear_layers(model, [&](const std::string& path, Linear& layer, bool own) {
    known.insert(last_name(path));
    if (!wanted.contains(last_name(path)) && (!all || is_output_projection(path))) return;
    missing.erase(last_name(path));
    TORCH_CHECK(!tied.contains(layer.weight.unsafeGetTensorImpl()), "--lora-target-modules: ", path,
                " shares its weight with the embeddings, which an adapter would not change: leave ", last_name(path),
                " out, or untie them: \"tie_word_embeddings\": false in config.json, or for a network of flags "
                "--untie-embeddings-and-output-weights");
    // Drawn for other ranks' experts too: all adapters start as on one rank.
    layer.add_adapter(options.rank, options.alpha / static_cast<double>(options.rank), options.dropout);
    count += own;
  });
  TORCH_CHECK(missing.empty(), "--lora-target-modules: the model has no linear layer ",
              listed({missing.begin(), missing.end()}), "; it has ", listed({known.begin(), known.end()}));
  model.keep_trained_only();
  return count;
}

ShardedTensors merged_state_dict(MegatronModule& model) {
  const at::NoGradGuard no_grad;
  std::unordered_map<std::string, Linear*> adapted;
  visit_linear_layers(model, [&](const std::string& path, Linear& layer, bool own) {
    if (own && layer.has_adapter()) adapted[path + ".weight"] = &layer;
  });
  ShardedTensors tensors;
  for (auto& [name, piece] : model.whole_state_dict()) {
    if (is_lora_parameter(name)) continue;
    const auto found = adapted.find(name);
    tensors.emplace_back(name, found == adapted.end() ? piece : merged(name, *found->second));
  }
  return tensors;
}

}  // namespace megashard
