#include "checkpoint/torch_dist/torch_dist_keys.h"

#include <algorithm>
#include <charconv>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/values/state_dict_keys.h"

namespace megashard {
namespace {

constexpr std::string_view kChained = "chained_";
constexpr std::string_view kLayers = "layers.";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// The prefix "chained_<n>." of the text; empty if it has none.
std::string_view chained_prefix(std::string_view text) {
  if (!text.starts_with(kChained)) return {};
  const auto end = text.find_first_not_of("0123456789", kChained.size());
  const bool is_prefix = end != std::string_view::npos && end > kChained.size() && text[end] == '.';
  return is_prefix ? text.substr(0, end + 1) : std::string_view();
}

/// Position after the first component "layers."; npos if there is none.
size_t behind_layers(const std::string& key) {
  for (auto at = key.find(kLayers); at != std::string::npos; at = key.find(kLayers, at + 1)) {
    if (at == 0 || key[at - 1] == '.') return at + kLayers.size();
  }
  return std::string::npos;
}

/// "<list>layers.<index>.<rest>"
struct LayerKey {
  std::string list;  // ends with "layers."
  int64_t index = 0;
  std::string rest;
};

std::optional<LayerKey> split_layer(const std::string& key) {
  const auto begin = behind_layers(key);
  if (begin == std::string::npos) return std::nullopt;
  LayerKey parts{key.substr(0, begin), 0, {}};
  const auto* const first = key.data() + begin;
  const auto parsed = std::from_chars(first, key.data() + key.size(), parts.index);
  const auto end = static_cast<size_t>(parsed.ptr - key.data());
  const bool canonical = parsed.ec == std::errc() && is_digit(*first) && (*first != '0' || end == begin + 1) &&
                         end + 1 < key.size() && key[end] == '.';
  if (!canonical) return std::nullopt;
  parts.rest = key.substr(end + 1);
  return parts;
}

/// One list of layers; `alike` until two layers differ in a tensor.
struct LayerList {
  struct Slot {
    const TensorInfo* first;
    int64_t count = 0;
  };
  std::unordered_map<std::string, Slot> slots;  // keyed by rest
  int64_t layers = 0;
  bool alike = true;

  void add(const LayerKey& key, const TensorInfo& info) {
    layers = std::max(layers, key.index + 1);
    auto& slot = slots.try_emplace(key.rest, Slot{&info}).first->second;
    ++slot.count;
    alike &= slot.first->dtype == info.dtype && slot.first->sizes == info.sizes;
  }
  /// Keys are distinct, so equal counts mean that every layer has the tensor.
  bool complete() const {
    return alike &&
           std::all_of(slots.begin(), slots.end(), [&](const auto& slot) { return slot.second.count == layers; });
  }
};

ShardedTensor as_layer(ShardedTensor piece, const TorchDistPlace& place) {
  piece.local = piece.local.unsqueeze(0);
  piece.global_sizes.insert(piece.global_sizes.begin(), place.layers);
  piece.offsets.insert(piece.offsets.begin(), *place.layer);
  for (auto& placement : piece.placements) {
    if (placement.kind != Placement::Kind::kReplicate) ++placement.dim;
  }
  return piece;
}

}  // namespace

std::string torch_dist_key(const std::string& key) {
  if (is_model_key(key)) return key.substr(kModelPrefix.size());
  if (is_optimizer_key(key)) {
    const auto rest = std::string_view(key).substr(kOptimizerPrefix.size());
    const auto chained = chained_prefix(rest);
    if (!chained.empty()) {
      return std::string(chained) + std::string(kOptimizerPrefix) + std::string(rest.substr(chained.size()));
    }
  }
  const auto parts = split_optimizer_state_key(key);
  if (!parts) return key;
  return std::string(kOptimizerStatePrefix) + parts->buffer + "." + parts->weight;
}

std::string torch_dcp_key(const std::string& dist_key) {
  const auto chained = chained_prefix(dist_key);
  const auto key = dist_key.substr(chained.size());
  if (!is_optimizer_key(key)) return model_key(dist_key);
  const auto prefix = kOptimizerStatePrefix.size();
  if (!key.starts_with(kOptimizerStatePrefix)) {
    return std::string(kOptimizerPrefix) + std::string(chained) + key.substr(kOptimizerPrefix.size());
  }
  const auto dot = key.find('.', prefix);
  if (dot == std::string::npos) return key;
  return optimizer_state_key(key.substr(dot + 1), key.substr(prefix, dot - prefix));
}

bool is_optimizer_step(const std::string& key) {
  const auto parts = split_optimizer_state_key(key);
  return parts && parts->buffer == kStepBuffer;
}

bool is_optimizer_bucket(const std::string& key) {
  return is_optimizer_key(key) && !key.starts_with(kOptimizerStatePrefix) &&
         key.find(".gbuf_idx_") != std::string::npos;
}

std::vector<TorchDistPlace> torch_dist_places(const std::vector<TensorInfo>& tensors) {
  std::vector<TorchDistPlace> places;
  std::vector<std::optional<LayerKey>> layer_keys;
  std::unordered_map<std::string, LayerList> lists;
  std::unordered_set<std::string> keys;
  for (const auto& info : tensors) {
    places.push_back({torch_dist_key(info.name), {}, 0});
    keys.insert(places.back().key);
    layer_keys.push_back(split_layer(places.back().key));
    if (layer_keys.back()) lists[layer_keys.back()->list].add(*layer_keys.back(), info);
  }
  std::unordered_set<std::string> stacked;
  for (const auto& item : lists) {
    const std::string& name = item.first;
    const auto& list = item.second;
    const bool is_free = std::none_of(list.slots.begin(), list.slots.end(), [&](const auto& slot) {
      return keys.count(name + slot.first) != 0;  // a tensor of the list itself has that name
    });
    if (list.complete() && is_free) stacked.insert(name);
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& parts = layer_keys[i];
    if (!parts || stacked.count(parts->list) == 0) continue;
    places[i] = {parts->list + parts->rest, parts->index, lists[parts->list].layers};
  }
  return places;
}

ShardedTensors stack_layers(const ShardedTensors& tensors) {
  std::vector<TensorInfo> infos;
  for (const auto& [key, tensor] : tensors) infos.push_back({key, tensor.local.scalar_type(), tensor.global_sizes});
  const auto places = torch_dist_places(infos);
  ShardedTensors stacked;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& piece = tensors[i].second;
    stacked.emplace_back(places[i].key, places[i].layer ? as_layer(piece, places[i]) : piece);
  }
  return stacked;
}

std::optional<std::string> key_of_layer(const std::string& stacked_key, int64_t layer) {
  const auto begin = behind_layers(stacked_key);
  if (begin == std::string::npos || begin == stacked_key.size() || is_digit(stacked_key[begin])) return std::nullopt;
  return stacked_key.substr(0, begin) + std::to_string(layer) + "." + stacked_key.substr(begin);
}

}  // namespace megashard
