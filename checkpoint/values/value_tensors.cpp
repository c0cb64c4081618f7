#include "checkpoint/values/value_tensors.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <unordered_map>

#include "checkpoint/values/tensor_info.h"

namespace megashard {
namespace {

constexpr int64_t kMaxStorageBytes = 64 << 20;
constexpr size_t kStorageParts = 5;  // "storage", class, key, device, elements

using StorageChange = std::function<Object(Object storage)>;

Value change_storages(const Value& value, const StorageChange& change);

std::vector<Value> change_all(std::vector<Value> items, const StorageChange& change) {
  for (auto& item : items) item = change_storages(item, change);
  return items;
}

Dict change_entries(Dict dict, const StorageChange& change) {
  for (auto& [key, item] : dict.entries) {
    key = change_storages(key, change);
    item = change_storages(item, change);
  }
  return dict;
}

/// Copies a value and changes its storages. The recursion depth is that of a pickle, which is bounded.
Value change_storages(const Value& value, const StorageChange& change) {
  if (const auto* list = value.get_if<List>()) return List{change_all(list->items, change)};
  if (const auto* tuple = value.get_if<Tuple>()) return Tuple{change_all(tuple->items, change)};
  if (const auto* dict = value.get_if<Dict>()) return change_entries(*dict, change);
  const auto* object = value.object();
  if (object == nullptr) return value;
  if (object->opcode == Object::Opcode::kPersId) return change(*object);
  Object changed = *object;
  changed.arguments = change_storages(object->arguments, change);
  changed.state = change_storages(object->state, change);
  changed.items = change_all(object->items, change);
  changed.entries = change_entries(object->entries, change);
  return changed;
}

const std::vector<Value>* identity_of(const Object& storage) {
  const auto* identity = storage.arguments.get_if<Tuple>();
  const bool known = identity != nullptr && identity->items.size() >= kStorageParts &&
                     identity->items[0] == Value("storage") && identity->items[2].get_if<std::string>() != nullptr;
  return known ? &identity->items : nullptr;
}

}  // namespace

std::vector<int64_t> ints_of(const Value& value) {
  if (const auto* size = value.get_if<TorchSize>()) return size->sizes;
  std::vector<int64_t> sizes;
  for (const auto& item : value.as_items()) sizes.push_back(item.as_int());
  return sizes;
}

Value tensor_value(const at::Tensor& tensor) {
  const auto data = tensor.detach().cpu().contiguous();
  const Bytes bytes{{static_cast<const char*>(data.const_data_ptr()), data.nbytes()}};
  return change_storages(tensor_record(data.scalar_type(), data.sizes().vec(), "0"), [&](Object storage) {
    storage.state = bytes;
    return storage;
  });
}

std::optional<at::Tensor> tensor_in(const Value& value) {
  const auto* record = value.object();
  if (record == nullptr || !record->class_name.starts_with("torch._utils._rebuild_tensor_v")) return std::nullopt;
  const auto& arguments = record->arguments.as_items();
  const auto* storage = arguments.size() < 4 ? nullptr : arguments[0].object();
  const auto* identity = storage == nullptr ? nullptr : identity_of(*storage);
  const auto* bytes = storage == nullptr ? nullptr : storage->state.get_if<Bytes>();
  const auto* name = identity == nullptr ? nullptr : (*identity)[1].get_if<Global>();
  if (bytes == nullptr || name == nullptr) return std::nullopt;
  const auto* known = name->name.starts_with("torch.") ? find_dtype_by_storage(name->name.substr(6)) : nullptr;
  const auto* named = arguments.size() > 6 ? arguments[6].get_if<at::ScalarType>() : nullptr;
  if (known == nullptr && named == nullptr) return std::nullopt;
  const auto dtype = known != nullptr ? known->dtype : *named;
  const auto sizes = ints_of(arguments[2]);
  const auto numel = checked_numel(sizes, static_cast<int64_t>(c10::elementSize(dtype)));
  const bool is_whole =
      arguments[1] == Value(0) && numel && static_cast<size_t>(*numel) * c10::elementSize(dtype) == bytes->data.size();
  if (!is_whole) return std::nullopt;
  auto tensor = at::empty(sizes, at::TensorOptions(dtype));
  if (*numel > 0) std::memcpy(tensor.data_ptr(), bytes->data.data(), bytes->data.size());
  return tensor;
}

std::optional<std::string> bytes_in(const Value& value) {
  if (const auto* bytes = value.get_if<Bytes>()) return bytes->data;
  const auto tensor = tensor_in(value);
  if (!tensor || tensor->scalar_type() != at::kByte) return std::nullopt;
  return std::string(static_cast<const char*>(tensor->const_data_ptr()), tensor->nbytes());
}

Value with_storages(const TorchArchive& archive, Value root) {
  auto left = kMaxStorageBytes;
  return change_storages(root, [&](Object storage) {
    const auto* identity = identity_of(storage);
    if (identity == nullptr) return storage;
    const auto name = "data/" + (*identity)[2].as_string();
    const auto bytes = archive.locate(name).length;
    if (bytes > left) return storage;
    left -= bytes;
    storage.state = Bytes{archive.read(name, bytes)};
    return storage;
  });
}

NumberedStorages number_storages(const Value& value) {
  NumberedStorages numbered;
  numbered.root = change_storages(value, [&](Object storage) {
    const auto* bytes = storage.state.get_if<Bytes>();
    const auto* identity = identity_of(storage);
    TORCH_CHECK(
        bytes != nullptr && identity != nullptr,
        "a plain value holds a tensor whose data was left in the file that it came from: it cannot be written again");
    auto parts = *identity;
    parts[2] = std::to_string(numbered.bytes.size());
    parts[3] = "cpu";
    numbered.bytes.push_back(bytes->data);
    storage.arguments = Tuple{std::move(parts)};
    return storage;
  });
  return numbered;
}

RenamedStorages rename_storages(const Value& value, size_t first) {
  RenamedStorages renamed;
  std::unordered_map<std::string, size_t> numbers;
  renamed.value = change_storages(value, [&](Object storage) {
    const auto* identity = identity_of(storage);
    TORCH_CHECK(identity != nullptr, "a tensor's storage is unknown");
    auto parts = *identity;
    const auto [number, is_new] = numbers.emplace(parts[2].as_string(), first + numbers.size());
    if (is_new) renamed.names.push_back(number->first);
    parts[2] = std::to_string(number->second);
    parts[3] = "cpu";
    storage.arguments = Tuple{std::move(parts)};
    return storage;
  });
  return renamed;
}

}  // namespace megashard
