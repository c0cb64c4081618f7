#include "checkpoint/values/archive_storages.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace megashard {
namespace {

class StorageRenamer {
 public:
  StorageRenamer(size_t first, std::vector<std::string>& names) : first_(first), names_(names) {}

  Value rename(const Value& value) {
    if (const auto* list = value.get_if<List>()) return List{rename_all(list->items)};
    if (const auto* tuple = value.get_if<Tuple>()) return Tuple{rename_all(tuple->items)};
    if (const auto* dict = value.get_if<Dict>()) return rename_dict(*dict);
    if (const auto* object = value.object()) return rename_object(*object);
    return value;
  }

 private:
  std::vector<Value> rename_all(const std::vector<Value>& items) {
    std::vector<Value> renamed;
    for (const auto& item : items) renamed.push_back(rename(item));
    return renamed;
  }

  Dict rename_dict(const Dict& dict) {
    Dict renamed;
    for (const auto& [key, value] : dict.entries)
      renamed.entries.emplace_back(rename(key), rename(value));
    return renamed;
  }

  Object rename_object(const Object& object) {
    if (object.making == Object::Making::kPersistent) return rename_storage(object);
    return {object.class_name,        object.making,
            rename(object.arguments), rename(object.state),
            rename_all(object.items), rename_dict(object.entries)};
  }

  /// ("storage", class, name, device, elements).
  Object rename_storage(const Object& storage) {
    auto renamed = storage;
    auto* identity = renamed.arguments.get_if<Tuple>();
    TORCH_CHECK(identity != nullptr && identity->items.size() >= 5, "a tensor's storage is unknown");
    const auto& name = identity->items[2].as_string();
    const auto found = std::find(names_.begin(), names_.end(), name);
    const auto number = first_ + static_cast<size_t>(found - names_.begin());
    if (found == names_.end()) names_.push_back(name);
    identity->items[2] = std::to_string(number);
    identity->items[3] = "cpu";
    return renamed;
  }

  size_t first_;
  std::vector<std::string>& names_;
};

}  // namespace

RenamedStorages rename_storages(const Value& value, size_t first) {
  RenamedStorages renamed;
  renamed.value = StorageRenamer(first, renamed.names).rename(value);
  return renamed;
}

}  // namespace megashard
