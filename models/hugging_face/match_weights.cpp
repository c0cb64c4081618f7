#include "models/hugging_face/match_weights.h"

#include <algorithm>
#include <compare>
#include <functional>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "framework/modules/megatron_module.h"
#include "models/decoder/decoder_model.h"
#include "models/lora/lora.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

/// Paths of the embeddings in files.
constexpr const char* kEmbeddingsPaths[] = {"model.", "model.language_model.", ""};
constexpr std::string_view kModelName = "model.";

using Stored = std::unordered_map<std::string, const TensorInfo*>;

WeightMap weight_map_of(const torch::nn::Module& module) {
  const auto* megatron = dynamic_cast<const MegatronModule*>(&module);
  return megatron == nullptr ? WeightMap() : megatron->weight_map();
}

/// Finds a model's tensors in files.
class Matcher {
 public:
  Matcher(const torch::nn::Module& module, const std::vector<TensorInfo>& infos, WeightMismatch& mismatch)
      : map_(weight_map_of(module)), mismatch_(mismatch) {
    for (const auto& info : infos) stored_.emplace(info.name, &info);
    for (const auto& item : module.named_parameters()) add(item.key(), item.value());
    for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  }

  std::vector<WeightTarget> match() && {
    std::unordered_set<std::string> grouped;
    for (const auto& group : map_.groups) {
      if (!by_name_.contains(group.tensors.front().name)) continue;  // adapters
      for (const auto& tensor : group.tensors) grouped.insert(tensor.name);
      match_group(group);
    }
    for (auto& target : targets_) {
      if (!grouped.contains(target.names.front())) match_as_it_is(target);
    }
    return std::move(targets_);
  }

  /// Names that were found or are missing.
  const std::unordered_set<std::string>& known() const { return known_; }
  /// Names that files can have.
  const std::unordered_set<std::string>& possible() const { return possible_; }

 private:
  using Spelling = std::function<std::string(const std::string& name)>;

  void add(const std::string& name, const at::Tensor& tensor) {
    if (is_lora_parameter(name)) return;  // initialised here
    const auto [found, is_new] = position_.emplace(tensor.unsafeGetTensorImpl(), targets_.size());
    if (is_new) targets_.push_back({.parameter = tensor, .names = {}});
    by_name_.emplace(name, found->second);
    auto& names = targets_[found->second].names;
    names.push_back(name);
    if (auto published = map_.published_name(name); published != name) names.push_back(std::move(published));
    possible_.insert(names.begin(), names.end());
  }

  const std::vector<int64_t>* sizes_in_files(const std::string& name) const {
    const auto found = stored_.find(name);
    return found == stored_.end() ? nullptr : &found->second->sizes;
  }

  void match_as_it_is(WeightTarget& target) {
    known_.insert(target.names.begin(), target.names.end());
    std::string source;
    const auto take = [&](const std::string& name) {
      if (!stored_.contains(name)) return;
      if (source.empty()) {
        source = name;
      } else {
        target.others.push_back(name);
      }
    };
    for (const auto& name : target.names) take(name);
    if (source.empty()) {
      for (const auto& name : target.names) {
        if (name.starts_with(kModelName)) take(name.substr(kModelName.size()));
      }
      target.is_bare = !source.empty();
    }
    const auto& name = target.names.front();
    if (source.empty() && name == kHeadWeight) {
      for (const std::string path : kEmbeddingsPaths) take(path + kEmbeddingsWeight);
    }
    if (source.empty()) {
      if (name != kScoreWeight) mismatch_.missing.push_back(name);
    } else {
      take_part(target, whole_part(name, source, global_sizes(target.parameter)), name);
    }
  }

  /// Takes the form that fits; else the one that comes closest, and tells the differences.
  void match_group(const WeightGroup& group) {
    struct Closeness {
      size_t fitting = 0, present = 0;
      auto operator<=>(const Closeness&) const = default;
    };
    const std::pair<Spelling, bool> spellings[] = {
        {[](const std::string& name) { return name; }, false},
        {[&](const std::string& name) { return map_.published_name(name); }, false},
        {[](const std::string& name) { return name.starts_with(kModelName) ? name.substr(kModelName.size()) : name; },
         true}};
    const StoredForm* best = &group.forms.front();
    const std::pair<Spelling, bool>* spelling = spellings;
    Closeness closest;
    for (const auto& each : spellings) {
      for (const auto& form : group.forms) {
        Closeness close;
        for (const auto& part : form.parts) {
          const auto name = each.first(part.stored);
          possible_.insert(name);
          const auto* sizes = sizes_in_files(name);
          close.present += sizes != nullptr;
          close.fitting += sizes != nullptr && *sizes == part.stored_sizes;
        }
        const bool fits = close.fitting == form.parts.size();
        if (fits) close.fitting = std::numeric_limits<size_t>::max();
        if (close <= closest) continue;
        closest = close;
        best = &form;
        spelling = &each;
      }
    }
    for (auto part : best->parts) {
      const auto name = std::exchange(part.stored, spelling->first(part.stored));
      auto& target = targets_[by_name_.at(part.tensor)];
      known_.insert(part.stored);
      target.is_bare = spelling->second && closest.present > 0;
      if (stored_.contains(part.stored)) {
        take_part(target, std::move(part), name);
      } else {
        note(mismatch_.missing, name);
      }
    }
  }

  void take_part(WeightTarget& target, WeightPart part, const std::string& name) {
    const auto& info = *stored_.at(part.stored);
    known_.insert(part.stored);
    if (!at::isFloatingType(info.dtype)) note(mismatch_.integers, part.stored);
    if (info.sizes != part.stored_sizes) {
      note(mismatch_.sizes, c10::str(part.stored, " ", at::IntArrayRef(info.sizes), " for ", name, " ",
                                     at::IntArrayRef(part.stored_sizes)));
    }
    target.parts.push_back(std::move(part));
  }

  /// Adds a text once: several parameters can be parts of one stored tensor.
  static void note(std::vector<std::string>& texts, std::string text) {
    if (std::ranges::count(texts, text) == 0) texts.push_back(std::move(text));
  }

  WeightMap map_;
  WeightMismatch& mismatch_;
  Stored stored_;
  std::vector<WeightTarget> targets_;
  std::unordered_map<const c10::TensorImpl*, size_t> position_;
  std::unordered_map<std::string, size_t> by_name_;
  std::unordered_set<std::string> known_, possible_;
};

/// Rotary frequencies in old Llama files, which follow from config.json, and a norm that Wan's attention never uses.
bool is_derived(const std::string& name) {
  return name.ends_with(".rotary_emb.inv_freq") || name.ends_with(".attn2.norm_added_q.weight");
}

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
  return target.names.front() == kHeadWeight && target.names.size() == 1 && !target.parts.empty() &&
         target.parts.front().stored.ends_with(kEmbeddingsWeight);
}

bool is_new_score(const WeightTarget& target) { return target.names.front() == kScoreWeight && target.parts.empty(); }

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
  Matcher matcher(module, infos, mismatch);
  auto targets = std::move(matcher).match();
  const auto& known = matcher.known();
  const auto map = weight_map_of(module);
  const auto* decoder = dynamic_cast<const DecoderModel*>(&module);
  const bool scores = decoder != nullptr && decoder->network().config.score_head;
  for (const auto& info : infos) {
    if (known.contains(info.name)) continue;
    const bool predicts = decoder != nullptr && decoder->is_of_prediction_layer(info.name);
    const bool follows = is_derived(info.name) || (decoder != nullptr && decoder->is_of_taken_keys(info.name));
    const bool is_head = scores && info.name == kHeadWeight;
    const bool is_other = map.leaves_out(info.name);
    auto& others = is_head    ? mismatch.heads
                   : is_other ? mismatch.of_others
                   : follows  ? mismatch.unused
                   : predicts ? mismatch.predicting
                              : mismatch.unexpected;
    others.push_back(info.name);
  }
  mismatch.hint = hint_at_wrapper(mismatch.unexpected, matcher.possible());
  return targets;
}

}  // namespace megashard
