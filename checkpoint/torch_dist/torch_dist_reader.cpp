#include "checkpoint/torch_dist/torch_dist_reader.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/torch_dist/torch_dist_keys.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/value_paths.h"
#include "checkpoint/values/value_tensors.h"

namespace megashard {
namespace {

constexpr const char* kCommonState = "common_state/shard_";

Value read_at(const std::string& folder, const DcpLocation& location) {
  const InputFile file(folder + "/" + location.file);
  return read_stored_value(file, location.range);
}

/// A stored ShardedObject is a list of one object.
const Value& only_item(const Value& list, const std::string& key) {
  TORCH_CHECK(list.as_items().size() == 1, key, " holds ", list.as_items().size(), " objects instead of one");
  return list.as_items()[0];
}

/// Megatron's writer cuts stacks into single layers.
bool is_stack(const DcpEntry& entry) {
  return !entry.chunks.empty() && !entry.sizes.empty() && key_of_layer(entry.key, 0).has_value() &&
         std::all_of(entry.chunks.begin(), entry.chunks.end(),
                     [](const DcpChunk& chunk) { return chunk.sizes[0] == 1; });
}

class TorchDistView {
 public:
  explicit TorchDistView(const std::string& folder) : folder_(folder) {}

  DcpMetadata of(DcpMetadata stored, std::optional<Dict> common) {
    common_ = common ? std::move(*common) : stored_common(stored);
    for (auto& entry : stored.entries) {
      if (!entry.is_tensor) {
        add_object(std::move(entry));
      } else if (is_stack(entry)) {
        add_layers(entry);
      } else {
        add_tensor(std::move(entry));
      }
    }
    add_common();
    return std::move(view_);
  }

 private:
  Dict stored_common(const DcpMetadata& stored) const {
    const auto found = std::find_if(stored.entries.begin(), stored.entries.end(), [](const DcpEntry& entry) {
      return !entry.is_tensor && entry.key.starts_with(kCommonState);
    });
    TORCH_CHECK(found != stored.entries.end(), folder_,
                " has neither common.pt nor a common_state: a torch_dist checkpoint has one of them");
    return only_item(read_at(folder_, found->location), found->key).as_dict();
  }

  void add_tensor(DcpEntry entry) {
    entry.key = torch_dcp_key(entry.key);
    add_tensor_as_is(std::move(entry));
  }

  void add_tensor_as_is(DcpEntry entry) {
    entry.path = tensor_path(entry.key);
    const bool is_new = keys_.insert(entry.key).second;
    TORCH_CHECK(is_new, folder_, " holds ", entry.key,
                " twice: stacked and with its number, or in two optimizers of a chain");
    view_.entries.push_back(std::move(entry));
  }

  void add_layers(const DcpEntry& stack) {
    std::vector<DcpEntry> layers;
    TORCH_CHECK(stack.sizes[0] <= static_cast<int64_t>(stack.chunks.size()), folder_, ": the layers of ", stack.key,
                " are not all there: ", stack.chunks.size(), " chunks for ", stack.sizes[0], " layers");
    for (int64_t i = 0; i < stack.sizes[0]; ++i) {
      DcpEntry layer{
          *key_of_layer(stack.key, i), {}, true, stack.dtype, {stack.sizes.begin() + 1, stack.sizes.end()}, {}, {}};
      layers.push_back(std::move(layer));
    }
    for (const auto& chunk : stack.chunks) {
      layers[static_cast<size_t>(chunk.offsets[0])].chunks.push_back({{chunk.offsets.begin() + 1, chunk.offsets.end()},
                                                                      {chunk.sizes.begin() + 1, chunk.sizes.end()},
                                                                      chunk.location,
                                                                      /*leading_ones=*/1});
    }
    for (auto& layer : layers) add_tensor(std::move(layer));
  }

  void add_value(std::vector<Value> path, Value value) {
    DcpEntry entry;
    for (const auto& part : path) {
      const auto* index = part.get_if<int64_t>();
      entry.key += (entry.key.empty() ? "" : ".") + (index != nullptr ? std::to_string(*index) : part.as_string());
    }
    entry.path = std::move(path);
    entry.value = std::move(value);
    view_.entries.push_back(std::move(entry));
  }

  void add_object(DcpEntry entry) {
    if (entry.key.starts_with(kCommonState)) return;
    if (!entry.key.starts_with(kRngStateShard)) {
      const auto key = torch_dcp_key(entry.key);
      if (is_optimizer_key(key) && key != entry.key) {
        entry.key = key;
        entry.path = {key};
      }
      entry.is_sharded_object = true;
      view_.entries.push_back(std::move(entry));
      return;
    }
    const auto at = entry.key.substr(std::string_view(kRngStateShard).size());  // "<offsets>_<shape>"
    if (at == kAllRanks) {
      const auto object = only_item(read_at(folder_, entry.location), entry.key);
      const auto& ranks = object.as_items();
      for (size_t rank = 0; rank < ranks.size(); ++rank)
        add_value({kRngStateKey, static_cast<int64_t>(rank)}, ranks[rank]);
      return;
    }
    // Ours is "<rank>_<world>"; ranks of Megatron's pipeline and tensor groups keep their numbers.
    const bool is_ours = at.find('.') == std::string::npos;
    entry.path = {kRngStateKey, is_ours ? at.substr(0, at.find('_')) : at};
    entry.key = std::string(kRngStateKey) + "." + entry.path[1].as_string();
    entry.is_sharded_object = true;
    view_.entries.push_back(std::move(entry));
  }

  void add_common() {
    join_chained();
    lift_optimizer();
    restore_group_names();
    const auto step = take_step();
    for (auto& leaf : flatten_values(common_)) add_value(std::move(leaf.path), std::move(leaf.value));
    if (!step) return;
    const auto first = std::string(".") + kExpAvgBuffer;  // of every weight that is trained
    const auto count = view_.entries.size();
    for (size_t i = 0; i < count; ++i) {
      const auto& key = view_.entries[i].key;
      if (!view_.entries[i].is_tensor || !key.ends_with(first)) continue;
      DcpEntry entry{key.substr(0, key.size() - first.size()) + "." + kStepBuffer, {}, true, at::kFloat, {}, {}, {}};
      if (keys_.count(entry.key) != 0) continue;
      entry.value = *step;
      add_tensor_as_is(std::move(entry));
    }
  }

  void restore_group_names() {
    const auto* names = common_.find(kTorchDistGroupNames);
    const auto* optimizer = common_.find(kOptimizerKey);
    if (names == nullptr || optimizer == nullptr) return;
    Value lists = *names;
    Dict with_names = optimizer->as_dict();
    auto groups = with_names.at(kParamGroupsKey).as_items();
    TORCH_CHECK(lists.as_items().size() == groups.size(), folder_, ": common.pt names the parameters of ",
                lists.as_items().size(), " groups of ", groups.size());
    for (size_t i = 0; i < groups.size(); ++i) {
      auto group = groups[i].as_dict();
      group.set(kParamsKey, lists.as_items()[i]);
      groups[i] = std::move(group);
    }
    with_names.set(kParamGroupsKey, List{std::move(groups)});
    common_.set(kOptimizerKey, std::move(with_names));
    std::erase_if(common_.entries, [](const auto& entry) { return entry.first == Value(kTorchDistGroupNames); });
  }

  /// {"optimizer": {"optimizer": {..}, "grad_scaler": {..}}} of mixed precision: one level less.
  static Dict lifted(const Dict& outer) {
    const auto* inner = outer.find(kOptimizerKey);
    if (inner == nullptr || inner->get_if<Dict>() == nullptr) return outer;
    Dict fields = *inner->get_if<Dict>();
    for (const auto& [key, value] : outer.entries) {
      const bool is_rest = key != Value(kOptimizerKey) && key != Value("fp32_from_fp16_params");
      if (is_rest) fields.set(key.as_string(), value);
    }
    return fields;
  }

  void lift_optimizer() {
    auto* optimizer = common_.find(kOptimizerKey);
    if (optimizer == nullptr || optimizer->get_if<Dict>() == nullptr) return;
    common_.set(kOptimizerKey, lifted(optimizer->as_dict()));
  }

  /// {"optimizer": {0: {..}, 1: {..}}} of a chain: one optimizer with the groups of all, and what
  /// they have in common as the first says it, the step too.
  void join_chained() {
    const auto* optimizer = common_.find(kOptimizerKey);
    const auto* chain = optimizer == nullptr ? nullptr : optimizer->get_if<Dict>();
    if (chain == nullptr || chain->entries.empty()) return;
    Dict joined;
    List groups;
    for (const auto& [number, part] : chain->entries) {
      if (number.get_if<int64_t>() == nullptr || part.get_if<Dict>() == nullptr) return;
      for (auto& [key, value] : lifted(part.as_dict()).entries) {
        if (key == Value(kParamGroupsKey) && value.get_if<List>() != nullptr) {
          for (const auto& group : value.as_items()) groups.items.push_back(group);
        } else if (joined.find(key.as_string()) == nullptr) {
          joined.set(key.as_string(), std::move(value));
        }
      }
    }
    joined.set(kParamGroupsKey, std::move(groups));
    common_.set(kOptimizerKey, std::move(joined));
  }

  /// common_step, or the step that TransformerEngine's optimizer keeps in the first param_group.
  std::optional<Value> take_step() {
    auto* optimizer = common_.find(kOptimizerKey);
    auto* fields = optimizer == nullptr ? nullptr : optimizer->get_if<Dict>();
    if (fields == nullptr) return std::nullopt;
    auto* state = fields->find(kStateKey);
    auto* of_state = state == nullptr ? nullptr : state->get_if<Dict>();
    if (of_state != nullptr && of_state->find(kCommonStep) != nullptr) {
      auto step = of_state->at(kCommonStep);
      of_state->entries.clear();
      const auto tensor = tensor_in(step);
      return tensor ? Value(tensor->item().toDouble()) : step;
    }
    const auto* groups = fields->find(kParamGroupsKey);
    if (groups == nullptr || groups->as_items().empty()) return std::nullopt;
    const auto* first = groups->as_items()[0].get_if<Dict>();
    const auto* step = first == nullptr ? nullptr : first->find(kStepBuffer);
    return step == nullptr ? std::nullopt : std::optional(*step);
  }

  std::string folder_;
  Dict common_;
  DcpMetadata view_;
  std::unordered_set<std::string> keys_;
};

}  // namespace

DcpMetadata read_torch_dist_metadata(const std::string& folder) {
  auto stored = read_dcp_metadata(folder);
  const auto path = folder + "/" + kCommonFile;
  std::optional<Dict> common;
  if (path_exists(path)) {
    const InputFile file(path);
    common = read_stored_value(file, {0, file.size()}).as_dict();
  }
  return view_torch_dist(std::move(stored), std::move(common), folder);
}

DcpMetadata view_torch_dist(DcpMetadata stored, std::optional<Dict> common, const std::string& folder) {
  return TorchDistView(folder).of(std::move(stored), std::move(common));
}

}  // namespace megashard
