#include "checkpoint/values/value_paths.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>

namespace megashard {
namespace {

constexpr int64_t kMostIndex = 1 << 20;
constexpr size_t kMostPathParts = 100;

std::string part_text(const Value& part) {
  const auto* index = part.get_if<int64_t>();
  return index != nullptr ? std::to_string(*index) : part.as_string();
}

/// torch's _is_terminal: a list that holds a dict, at whatever depth of lists, is split.
bool is_leaf(const Value& value) {
  if (value.get_if<Dict>() != nullptr) return false;
  const auto* list = value.get_if<List>();
  return list == nullptr || std::all_of(list->items.begin(), list->items.end(), is_leaf);
}

void flatten_into(std::vector<FlatValue>& flat, std::vector<Value>& path, const Value& value) {
  if (const auto* dict = value.get_if<Dict>()) {
    for (const auto& [key, entry] : dict->entries) {
      path.emplace_back(part_text(key));
      flatten_into(flat, path, entry);
      path.pop_back();
    }
  } else if (!is_leaf(value)) {
    const auto& items = value.as_items();
    for (size_t i = 0; i < items.size(); ++i) {
      path.emplace_back(static_cast<int64_t>(i));
      flatten_into(flat, path, items[i]);
      path.pop_back();
    }
  } else {
    std::string key;
    for (const auto& part : path) key += (key.empty() ? "" : ".") + part_text(part);
    flat.push_back({std::move(key), path, value});
  }
}

void insert_into(Value& node, const std::vector<Value>& path, size_t depth, Value value) {
  if (depth == path.size()) {
    node = std::move(value);
    return;
  }
  if (const auto* index = path[depth].get_if<int64_t>()) {
    TORCH_CHECK(*index >= 0 && *index < kMostIndex, "a list index of ", *index, " in a checkpoint's key");
    if (node.is_none()) node = List();
    auto* list = node.get_if<List>();
    TORCH_CHECK(list != nullptr, "a key of the checkpoint indexes ", node.kind());
    if (list->items.size() <= static_cast<size_t>(*index))
      list->items.resize(static_cast<size_t>(*index) + 1);
    insert_into(list->items[static_cast<size_t>(*index)], path, depth + 1, std::move(value));
    return;
  }
  if (node.is_none()) node = Dict();
  auto* dict = node.get_if<Dict>();
  TORCH_CHECK(dict != nullptr, "a key of the checkpoint lies inside ", node.kind());
  const auto& name = path[depth].as_string();
  if (dict->find(name) == nullptr) dict->entries.emplace_back(name, Value());
  insert_into(*dict->find(name), path, depth + 1, std::move(value));
}

}  // namespace

std::vector<FlatValue> flatten_values(const Dict& nested) {
  std::vector<FlatValue> flat;
  std::vector<Value> path;
  flatten_into(flat, path, nested);
  std::unordered_set<std::string> keys;
  for (const auto& leaf : flat) {
    TORCH_CHECK(keys.insert(leaf.key).second, "two values of the checkpoint would both have the key ", leaf.key);
  }
  return flat;
}

void insert_value(Dict& nested, const std::vector<Value>& path, Value value) {
  TORCH_CHECK(path.size() < kMostPathParts, "a key of the checkpoint is nested ", path.size(), " deep");
  Value root(std::move(nested));
  insert_into(root, path, 0, std::move(value));
  nested = std::move(*root.get_if<Dict>());
}

std::vector<Value> tensor_path(const std::string& key) {
  constexpr std::string_view kModel = "model.";
  constexpr std::string_view kState = "optimizer.state.";
  if (key.starts_with(kModel)) return {"model", key.substr(kModel.size())};
  const auto last = key.rfind('.');
  if (key.starts_with(kState) && last >= kState.size()) {
    return {"optimizer", "state", key.substr(kState.size(), last - kState.size()),
            key.substr(last + 1)};
  }
  return {key};
}

}  // namespace megashard
