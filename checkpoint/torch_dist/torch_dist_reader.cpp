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

/// Returns the object of a stored ShardedObject, which is a list of one.
const Value& only_item(const Value& list, const std::string& key) {
  TORCH_CHECK(list.as_items().size() == 1, key, " holds ", list.as_items().size(), " objects instead of one");
  return list.as_items()[0];
}

/// True for a stack: Megatron's writer cuts them into single layers.
bool is_stack(const std::string& key, const DcpTensor& tensor) {
  return !tensor.chunks.empty() && !tensor.sizes.empty() && key_of_layer(key, 0).has_value() &&
         std::all_of(tensor.chunks.begin(), tensor.chunks.end(),
                     [](const DcpChunk& chunk) { return chunk.sizes[0] == 1; });
}

class TorchDistView {
 public:
  explicit TorchDistView(const std::string& folder) : folder_(folder) {}

  DcpMetadata of(DcpMetadata stored, std::optional<DcpKnownValue> common) {
    if (!common) common = stored_common(stored);
    common_ = common->value.as_dict();
    common_location_ = common->location;
    for (auto& entry : stored.entries) {
      if (auto* bytes = std::get_if<DcpBytes>(&entry.stored)) {
        add_object(entry, *bytes);
      } else if (const auto& tensor = std::get<DcpTensor>(entry.stored); is_stack(entry.key, tensor)) {
        add_layers(entry.key, tensor);
      } else {
        add_tensor(std::move(entry));
      }
    }
    add_common();
    return std::move(view_);
  }

 private:
  DcpKnownValue stored_common(const DcpMetadata& stored) const {
    const auto found = std::find_if(stored.entries.begin(), stored.entries.end(), [](const DcpEntry& entry) {
      return std::holds_alternative<DcpBytes>(entry.stored) && entry.key.starts_with(kCommonState);
    });
    TORCH_CHECK(found != stored.entries.end(), folder_,
                " has neither common.pt nor a common_state: a torch_dist checkpoint has one of them");
    const auto& location = std::get<DcpBytes>(found->stored).location;
    return {only_item(read_at(folder_, location), found->key), location};
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

  void add_layers(const std::string& key, const DcpTensor& stack) {
    TORCH_CHECK(stack.sizes[0] <= static_cast<int64_t>(stack.chunks.size()), folder_, ": the layers of ", key,
                " are not all there: ", stack.chunks.size(), " chunks for ", stack.sizes[0], " layers");
    std::vector<DcpTensor> layers(
        static_cast<size_t>(stack.sizes[0]),
        DcpTensor{.dtype = stack.dtype, .sizes = {stack.sizes.begin() + 1, stack.sizes.end()}});
    for (const auto& chunk : stack.chunks) {
      layers[static_cast<size_t>(chunk.offsets[0])].chunks.push_back(
          {.offsets = {chunk.offsets.begin() + 1, chunk.offsets.end()},
           .sizes = {chunk.sizes.begin() + 1, chunk.sizes.end()},
           .location = chunk.location,
           .leading_ones = 1});
    }
    for (size_t i = 0; i < layers.size(); ++i)
      add_tensor({.key = *key_of_layer(key, static_cast<int64_t>(i)), .stored = std::move(layers[i])});
  }

  void add_value(std::vector<Value> path, Value value, const DcpLocation& location) {
    DcpEntry entry{.stored = DcpKnownValue{std::move(value), location}};
    for (const auto& part : path) {
      const auto* index = part.get_if<int64_t>();
      entry.key += (entry.key.empty() ? "" : ".") + (index != nullptr ? std::to_string(*index) : part.as_string());
    }
    entry.path = std::move(path);
    view_.entries.push_back(std::move(entry));
  }

  void add_object(const DcpEntry& entry, DcpBytes bytes) {
    if (entry.key.starts_with(kCommonState)) return;
    bytes.is_sharded_object = true;
    if (!entry.key.starts_with(kRngStateShard)) {
      const auto key = torch_dcp_key(entry.key);
      const bool is_renamed = is_optimizer_key(key) && key != entry.key;
      view_.entries.push_back({.key = is_renamed ? key : entry.key,
                               .path = is_renamed ? std::vector<Value>{key} : entry.path,
                               .stored = std::move(bytes)});
      return;
    }
    const auto at = entry.key.substr(std::string_view(kRngStateShard).size());  // "<offsets>_<shape>"
    if (at == kAllRanks) {
      const auto object = only_item(read_at(folder_, bytes.location), entry.key);
      const auto& ranks = object.as_items();
      for (size_t rank = 0; rank < ranks.size(); ++rank)
        add_value({kRngStateKey, static_cast<int64_t>(rank)}, ranks[rank], bytes.location);
      return;
    }
    // Ours is "<rank>_<world>"; ranks of Megatron's pipeline and tensor parallel groups keep their numbers.
    const bool is_ours = at.find('.') == std::string::npos;
    const auto rank = is_ours ? at.substr(0, at.find('_')) : at;
    view_.entries.push_back(
        {.key = std::string(kRngStateKey) + "." + rank, .path = {kRngStateKey, rank}, .stored = std::move(bytes)});
  }

  void add_common() {
    join_chained();
    lift_optimizer();
    restore_group_names();
    const auto step = take_step();
    for (auto& leaf : flatten_values(common_)) add_value(std::move(leaf.path), std::move(leaf.value), common_location_);
    if (!step) return;
    const auto first = std::string(".") + kExpAvgBuffer;  // every trained weight has one
    const auto count = view_.entries.size();
    for (size_t i = 0; i < count; ++i) {
      const auto& key = view_.entries[i].key;
      if (view_.entries[i].tensor() == nullptr || !key.ends_with(first)) continue;
      auto step_key = key.substr(0, key.size() - first.size()) + "." + kStepBuffer;
      if (keys_.count(step_key) == 0) add_tensor_as_is({.key = std::move(step_key), .stored = DcpCommonStep{*step}});
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

  /// {"optimizer": {"optimizer": {..}, "grad_scaler": {..}}} of mixed precision: removes one level.
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

  /// {"optimizer": {0: {..}, 1: {..}}} of a chain: merges the groups into one optimizer; common fields, also the step,
  /// come from the first.
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

  /// Takes common_step, or the step that TransformerEngine's optimizer stores in the first param_group.
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
  DcpLocation common_location_;
  DcpMetadata view_;
  std::unordered_set<std::string> keys_;
};

}  // namespace

DcpMetadata read_torch_dist_metadata(const std::string& folder) {
  auto stored = read_dcp_metadata(folder);
  const auto path = folder + "/" + kCommonFile;
  std::optional<DcpKnownValue> common;
  if (path_exists(path)) {
    const InputFile file(path);
    const FileRange whole{0, file.size()};
    common = DcpKnownValue{read_stored_value(file, whole), {kCommonFile, whole}};
  }
  return view_torch_dist(std::move(stored), std::move(common), folder);
}

DcpMetadata view_torch_dist(DcpMetadata stored, std::optional<DcpKnownValue> common, const std::string& folder) {
  return TorchDistView(folder).of(std::move(stored), std::move(common));
}

}  // namespace megashard
