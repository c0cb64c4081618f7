#include "models/hugging_face/match_weights.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "models/config/weight_files.h"
#include "models/lora/lora.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

constexpr std::string_view kEmbeddingsName = "embed_tokens.weight";
constexpr const char* kEmbeddings[] = {"model.embed_tokens.weight", "model.language_model.embed_tokens.weight",
                                       "embed_tokens.weight"};
constexpr std::string_view kModelName = "model.";

using Stored = std::unordered_map<std::string, const TensorInfo*>;

std::vector<WeightTarget> targets_of(const torch::nn::Module& module) {
  const auto* published = dynamic_cast<const PublishedWeights*>(&module);
  std::vector<WeightTarget> targets;
  std::unordered_map<const c10::TensorImpl*, size_t> position;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (is_lora_parameter(name)) return;  // initialised here
    const auto [found, is_new] = position.emplace(tensor.unsafeGetTensorImpl(), targets.size());
    if (is_new) targets.push_back({.parameter = tensor, .names = {}});
    auto& names = targets[found->second].names;
    names.push_back(name);
    if (published == nullptr) return;
    const auto other = published->published_name(name);
    if (other != name) names.push_back(other);
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return targets;
}

void find_source(WeightTarget& target, const Stored& stored) {
  const auto take = [&](const std::string& name) {
    if (!stored.contains(name)) return;
    if (target.source.empty()) {
      target.source = name;
    } else {
      target.others.push_back(name);
    }
  };
  for (const auto& name : target.names) take(name);
  if (!target.source.empty()) return;
  for (const auto& name : target.names) {
    if (name.starts_with(kModelName)) take(name.substr(kModelName.size()));
  }
  const auto& name = target.names.front();
  if (target.source.empty() && name == kHeadWeight) {
    for (const char* embeddings : kEmbeddings) take(embeddings);
  }
  auto stacked = StackedWeight::of(name);
  if (!target.source.empty() || !stacked) return;
  if (!stored.contains(stacked->source()) && stacked->experts.starts_with(kModelName))
    stacked->experts.erase(0, kModelName.size());
  if (!stored.contains(stacked->source())) return;
  target.source = stacked->source();
  target.stacked = std::move(stacked);
}

/// Sizes of the target's data in the files; nullopt if there is no such expert or the dimensions differ.
std::optional<std::vector<int64_t>> stored_sizes(const WeightTarget& target, const Stored& stored) {
  const auto& sizes = stored.at(target.source)->sizes;
  if (!target.stacked) return sizes;
  const auto other = stored.find(target.stacked->other_source());
  if (other == stored.end()) return std::nullopt;
  const auto view = target.stacked->view(at::empty(sizes, at::kMeta), other->second->sizes);
  return view.defined() ? std::optional(view.sizes().vec()) : std::nullopt;
}

/// Rotary frequencies in old Llama files, which follow from config.json.
bool is_derived(const std::string& name) { return name.ends_with(".rotary_emb.inv_freq"); }

std::string without(std::string name, std::string_view word) {
  for (auto at = name.find(word); at != std::string::npos; at = name.find(word, at)) name.erase(at, word.size());
  return name;
}

/// A hint if all unexpected names would be known without a wrapper's prefix.
std::string hint_at_wrapper(const std::vector<std::string>& unexpected, const std::unordered_set<std::string>& known) {
  constexpr std::pair<const char*, const char*> kWrappers[] = {{"_orig_mod.", "torch.compile"},
                                                               {"module.", "DistributedDataParallel"},
                                                               {"_fsdp_wrapped_module.", "PyTorch's FSDP1"},
                                                               {"_checkpoint_wrapped_module.", "its recompute"}};
  for (const auto& [word, who] : kWrappers) {
    const auto is_wrapped = [&, word = word](const std::string& name) { return known.contains(without(name, word)); };
    if (unexpected.empty() || !std::all_of(unexpected.begin(), unexpected.end(), is_wrapped)) continue;
    return c10::str("; their names have \"", word, "\", the mark of ", who,
                    ", in them: save the model that it wraps, or rename the tensors");
  }
  return "";
}

}  // namespace

bool is_borrowed_head(const WeightTarget& target) {
  return target.names.front() == kHeadWeight && target.names.size() == 1 && target.source.ends_with(kEmbeddingsName);
}

bool is_bare_name(const WeightTarget& target) {
  if (target.source.empty() || is_borrowed_head(target)) return false;
  if (target.stacked) return target.source != StackedWeight::of(target.names.front())->source();
  return std::find(target.names.begin(), target.names.end(), target.source) == target.names.end();
}

std::string WeightMismatch::text() const {
  std::string problem;
  if (!missing.empty()) problem += "; missing: " + listed(missing);
  if (!unexpected.empty()) problem += "; unexpected: " + listed(unexpected);
  if (!sizes.empty()) problem += "; of other sizes: " + listed(sizes);
  if (!integers.empty()) problem += "; of integers, so quantised: " + listed(integers);
  return problem + hint;
}

std::vector<WeightTarget> match_weights(const torch::nn::Module& module, const std::vector<TensorInfo>& infos,
                                        WeightMismatch& mismatch) {
  Stored stored;
  for (const auto& info : infos) stored.emplace(info.name, &info);
  auto targets = targets_of(module);
  std::unordered_set<std::string> known;
  std::map<std::string, int64_t> experts_in;  // number of the model's experts in each stacked tensor
  for (auto& target : targets) {
    known.insert(target.names.begin(), target.names.end());
    find_source(target, stored);
    if (target.source.empty()) {
      mismatch.missing.push_back(target.names.front());
      continue;
    }
    if (!at::isFloatingType(stored.at(target.source)->dtype)) mismatch.integers.push_back(target.source);
    const auto wanted = global_sizes(target.parameter);
    known.insert(target.source);
    if (target.stacked) {
      auto& experts = experts_in[target.source];
      experts = std::max(experts, target.stacked->expert + 1);
    }
    const auto sizes = stored_sizes(target, stored);
    if (sizes && at::IntArrayRef(*sizes) == at::IntArrayRef(wanted)) continue;
    const at::IntArrayRef whole = stored.at(target.source)->sizes;
    mismatch.sizes.push_back(
        c10::str(target.source, " ", whole, " for ", target.names.front(), " ", at::IntArrayRef(wanted)));
  }
  for (const auto& [source, experts] : experts_in) {
    const auto there = stored.at(source)->sizes.front();
    if (there > experts)
      mismatch.sizes.push_back(c10::str(source, " of ", there, " experts for ", experts));
  }
  for (const auto& info : infos) {
    if (known.contains(info.name)) continue;
    (is_derived(info.name) ? mismatch.unused : mismatch.unexpected).push_back(info.name);
  }
  mismatch.hint = hint_at_wrapper(mismatch.unexpected, known);
  return targets;
}

}  // namespace megashard
