#include "models/hugging_face/load_hf_weights.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/values/tensor_info.h"
#include "framework/modules/megatron_module.h"
#include "models/hugging_face/weight_names.h"
#include "models/layers/lora.h"
#include "models/moe/stacked_experts.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbeddings[] = {"model.embed_tokens.weight",
                                       "model.language_model.embed_tokens.weight"};

struct Target {
  at::Tensor parameter;
  std::vector<std::string> names;        // more than one: tied
  std::string source;                    // its name in the files
  std::optional<StackedWeight> stacked;  // where in it
};

/// The module's parameters, each once, with the names that they may have in files.
std::vector<Target> targets_of(const torch::nn::Module& module) {
  const auto* published = dynamic_cast<const PublishedNames*>(&module);
  std::vector<Target> targets;
  std::unordered_map<const c10::TensorImpl*, size_t> position;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    if (is_lora_parameter(item.key())) continue;  // trained here
    const auto [found, is_new] =
        position.emplace(item.value().unsafeGetTensorImpl(), targets.size());
    if (is_new)
      targets.push_back({.parameter = item.value(), .names = {}, .source = {}, .stacked = {}});
    auto& names = targets[found->second].names;
    names.push_back(item.key());
    if (published == nullptr) continue;
    const auto other = published->published_name(item.key());
    if (other != item.key()) names.push_back(other);
  }
  return targets;
}

void find_source(Target& target, const HfWeights& files) {
  for (const auto& name : target.names) {
    if (!files.contains(name)) continue;
    target.source = name;
    return;
  }
  const auto& name = target.names.front();
  for (const char* embedding : kEmbeddings) {
    if (name == kHead && files.contains(embedding)) target.source = embedding;
  }
  auto stacked = StackedWeight::of(name);
  if (!stacked || !files.contains(stacked->source())) return;
  target.source = stacked->source();
  target.stacked = std::move(stacked);
}

/// What the files have for it; undefined: nothing of its number of dimensions.
at::Tensor stored_tensor(const Target& target, const HfWeights& files) {
  return target.stacked ? target.stacked->view(files) : files.tensor(target.source);
}

/// Old Llama files carry the rotary frequencies, which follow from config.json.
bool is_derived(const std::string& name) { return name.ends_with(".rotary_emb.inv_freq"); }

void check_names(std::vector<Target>& targets, const HfWeights& files, const std::string& folder,
                 const torch::nn::Module& module) {
  const auto* megatron = dynamic_cast<const MegatronModule*>(&module);
  const auto is_elsewhere = [&](const std::string& name) {
    return megatron != nullptr && megatron->is_elsewhere(name);
  };
  std::vector<std::string> missing;
  std::vector<std::string> sizes;
  std::vector<std::string> integers;  // quantised
  std::unordered_set<std::string> known;
  std::map<std::string, int64_t> experts_in;  // of the model, in a stacked tensor
  for (auto& target : targets) {
    known.insert(target.names.begin(), target.names.end());
    find_source(target, files);
    if (target.source.empty()) {
      missing.push_back(target.names.front());
      continue;
    }
    if (!at::isFloatingType(files.info(target.source).dtype)) integers.push_back(target.source);
    const auto wanted = global_sizes(target.parameter);
    if (target.stacked) {
      known.insert(target.source);
      auto& experts = experts_in[target.source];
      experts = std::max(experts, target.stacked->expert + 1);
    }
    const auto stored = stored_tensor(target, files);
    if (stored.defined() && stored.sizes() == wanted) continue;
    const at::IntArrayRef whole = files.info(target.source).sizes;
    sizes.push_back(c10::str(target.source, " ", whole, " for ", target.names.front(), " ",
                             at::IntArrayRef(wanted)));
  }
  for (const auto& [source, experts] : experts_in) {
    const auto stored = files.info(source).sizes.front();
    const bool more_elsewhere =
        is_elsewhere(source.substr(0, source.rfind('.')) + "." + std::to_string(stored - 1) + ".");
    if (stored > experts && !more_elsewhere)
      sizes.push_back(c10::str(source, " of ", stored, " experts for ", experts));
  }
  std::vector<std::string> unexpected;
  for (const auto& info : files.tensors()) {
    const bool needed_here = !is_derived(info.name) && !is_elsewhere(info.name);
    if (needed_here && !known.contains(info.name)) unexpected.push_back(info.name);
  }
  std::string problem;
  if (!missing.empty()) problem += c10::str("; missing: ", listed(missing));
  if (!unexpected.empty()) problem += c10::str("; unexpected: ", listed(unexpected));
  if (!sizes.empty()) problem += c10::str("; of other sizes: ", listed(sizes));
  if (!integers.empty()) problem += c10::str("; of integers, so quantised: ", listed(integers));
  TORCH_CHECK(problem.empty(), "the weights in ", folder, " are not those of the model", problem,
              ". Give the directory that the model's config.json comes from");
}

}  // namespace

void load_hf_weights(torch::nn::Module& module, const std::filesystem::path& hf_dir) {
  const HfWeights files(hf_dir.string());
  auto targets = targets_of(module);
  check_names(targets, files, hf_dir.string(), module);
  const at::NoGradGuard no_grad;
  for (const auto& target : targets) {
    auto piece = sharded_view(target.parameter);
    auto stored = stored_tensor(target, files);
    for (int64_t dim = 0; dim < stored.dim(); ++dim) {
      if (piece.local.size(dim) == stored.size(dim)) continue;
      const int64_t rows = piece.local.size(dim);
      stored = stored.narrow(dim, rows == 0 ? 0 : piece.offsets[static_cast<size_t>(dim)], rows);
    }
    if (stored.numel() > 0) piece.local.copy_(stored);
  }
}

}  // namespace megashard
