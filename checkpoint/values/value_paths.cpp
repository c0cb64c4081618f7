#include "checkpoint/values/value_paths.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_text.h"

namespace megashard {
namespace {

constexpr size_t kMaxPathParts = 100;

std::string part_text(const Value& part) {
  const auto* index = part.get_if<int64_t>();
  return index != nullptr ? std::to_string(*index) : part.as_string();
}

/// str(key), as torch uses for keys below it.
std::string key_text(const Value& key) {
  const bool is_text = key.get_if<std::string>() != nullptr;
  if (is_text || key.get_if<int64_t>() != nullptr) return part_text(key);
  TORCH_CHECK_VALUE(key.is_none() || key.get_if<bool>() != nullptr || key.get_if<double>() != nullptr,
                    "a dict of the checkpoint has a key that is ", key.kind(), ", which gives no name");
  return value_text(key);
}

/// The entries of a dict, collections.Counter, defaultdict or another dict subclass; null for other values.
const Dict* mapping_of(const Value& value) {
  if (const auto* dict = value.get_if<Dict>()) return dict;
  const auto* object = value.object();
  if (object == nullptr) return nullptr;
  if (object->class_name == "collections.Counter") {
    const auto* arguments = object->arguments.get_if<Tuple>();
    const bool is_whole = arguments != nullptr && arguments->items.size() == 1;
    return is_whole ? arguments->items[0].get_if<Dict>() : nullptr;
  }
  const bool is_dict = object->class_name == "collections.defaultdict" || !object->entries.entries.empty();
  return is_dict ? &object->entries : nullptr;
}

/// torch's _is_terminal: a list is split if it contains a mapping or a tensor, at any depth of lists.
bool is_leaf(const Value& value) {
  if (mapping_of(value) != nullptr) return false;
  const auto* list = value.get_if<List>();
  return list == nullptr || std::all_of(list->items.begin(), list->items.end(),
                                        [](const Value& item) { return !is_tensor_record(item) && is_leaf(item); });
}

void flatten_into(std::vector<FlatValue>& flat, std::vector<Value>& path, const Value& value) {
  if (const auto* mapping = mapping_of(value)) {
    for (const auto& [key, entry] : mapping->entries) {
      path.emplace_back(key_text(key));
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

/// Leaves with the same path up to and including `part`.
struct Branch {
  const Value* part;
  std::vector<FlatValue*> leaves;
};

class Nesting {
 public:
  explicit Nesting(size_t keys) : max_gaps_(static_cast<int64_t>(keys)) {}

  /// Nests leaves whose paths share the first `depth` parts.
  Value nest(const std::vector<FlatValue*>& leaves, size_t depth) {
    Value ended;
    std::vector<Branch> branches;
    std::unordered_map<std::string, size_t> places;
    for (auto* leaf : leaves) {
      if (leaf->path.size() == depth) {
        ended = std::move(leaf->value);
        continue;
      }
      const auto& part = leaf->path[depth];
      const auto [place, is_new] = places.emplace(part_text(part), branches.size());
      if (is_new) branches.push_back({&part, {}});
      branches[place->second].leaves.push_back(leaf);
    }
    if (branches.empty()) return ended;
    TORCH_CHECK(ended.is_none(), "the checkpoint's key ", branches[0].leaves[0]->key,
                " lies inside another one, which is ", ended.kind());
    return is_index(*branches[0].part) ? Value(list_of(branches, depth)) : Value(dict_of(branches, depth));
  }

 private:
  static bool is_index(const Value& part) { return part.get_if<int64_t>() != nullptr; }

  Dict dict_of(const std::vector<Branch>& branches, size_t depth) {
    Dict dict;
    for (const auto& [part, leaves] : branches) dict.entries.emplace_back(part->as_string(), nest(leaves, depth + 1));
    return dict;
  }

  List list_of(const std::vector<Branch>& branches, size_t depth) {
    int64_t length = 0;
    for (const auto& [part, leaves] : branches) {
      const auto index = part->as_int();
      TORCH_CHECK(index >= 0 && index <= max_gaps_, "the checkpoint's key ", leaves[0]->key, " has the list index ",
                  index, ", and the checkpoint has ", max_gaps_, " keys: its metadata is damaged");
      length = std::max(length, index + 1);
    }
    gaps_ += length - static_cast<int64_t>(branches.size());
    TORCH_CHECK(gaps_ <= max_gaps_, "the lists of the checkpoint, up to that of its key ", branches[0].leaves[0]->key,
                ", lack ", gaps_, " items, and it has ", max_gaps_, " keys: its metadata is damaged");
    List list;
    list.items.resize(static_cast<size_t>(length));
    for (const auto& [part, leaves] : branches)
      list.items[static_cast<size_t>(part->as_int())] = nest(leaves, depth + 1);
    return list;
  }

  int64_t max_gaps_;  // limit over all lists
  int64_t gaps_ = 0;
};

}  // namespace

std::vector<FlatValue> flatten_values(const Dict& nested) {
  std::vector<FlatValue> flat;
  std::vector<Value> path;
  flatten_into(flat, path, nested);
  std::unordered_set<std::string> keys;
  for (const auto& leaf : flat) {
    TORCH_CHECK_VALUE(keys.insert(leaf.key).second, "two values of the checkpoint would both have the key ", leaf.key);
  }
  return flat;
}

Dict nest_values(std::vector<FlatValue> leaves, size_t keys) {
  std::vector<FlatValue*> all;
  for (auto& leaf : leaves) {
    TORCH_CHECK(!leaf.path.empty() && leaf.path.size() < kMaxPathParts, "the checkpoint's key ", leaf.key,
                " is nested ", leaf.path.size(), " deep");
    TORCH_CHECK(leaf.path[0].get_if<std::string>() != nullptr, "the checkpoint's key ", leaf.key, " begins with ",
                leaf.path[0].kind(), ", not with a name");
    all.push_back(&leaf);
  }
  if (all.empty()) return {};
  auto nested = Nesting(keys).nest(all, 0);
  return std::move(*nested.get_if<Dict>());
}

}  // namespace megashard
