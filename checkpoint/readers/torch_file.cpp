#include "checkpoint/readers/torch_file.h"

#include <algorithm>
#include <filesystem>

namespace megashard {
namespace {

/// True if a list holds tensors or dicts and is entered.
bool holds_more(const TorchArchive& archive, const Value& value) {
  if (value.get_if<Dict>() != nullptr || stored_tensor(archive, value)) return true;
  if (value.get_if<List>() == nullptr && value.get_if<Tuple>() == nullptr) return false;
  const auto& items = value.as_items();
  return std::any_of(items.begin(), items.end(), [&](const Value& item) { return holds_more(archive, item); });
}

std::string joined(const std::vector<Value>& path) {
  std::string key;
  for (const auto& part : path) {
    const auto* text = part.get_if<std::string>();
    key += (key.empty() ? "" : ".") + (text != nullptr ? *text : std::to_string(part.as_int()));
  }
  return key;
}

/// A dict's key as part of a path; keys other than strings and ints are replaced by their kind.
Value part_of(const Value& key) {
  const bool plain = key.get_if<std::string>() != nullptr || key.get_if<int64_t>() != nullptr;
  return plain ? key : Value("<" + key.kind() + ">");
}

}  // namespace

TorchFile::TorchFile(const std::string& path)
    : CheckpointReader(path), file_(path), archive_(file_, {0, file_.size()}) {
  std::vector<Value> parts;
  collect(parts, read_root(archive_));
}

void TorchFile::collect(std::vector<Value>& path, const Value& value) {
  const auto enter = [&](Value part, const Value& inner) {
    path.push_back(std::move(part));
    collect(path, inner);
    path.pop_back();
  };
  if (const auto stored = stored_tensor(archive_, value)) {
    auto key = joined(path);
    stored_.emplace(key, *stored);
    add_tensor({std::move(key), stored->dtype, stored->sizes});
  } else if (const auto* dict = value.get_if<Dict>()) {
    for (const auto& [key, inner] : dict->entries) enter(part_of(key), inner);
  } else if (holds_more(archive_, value)) {
    const auto& items = value.as_items();
    for (size_t i = 0; i < items.size(); ++i) enter(static_cast<int64_t>(i), items[i]);
  } else {
    add_value({joined(path), path}, value);
  }
}

std::vector<StoredChunk> TorchFile::chunks(const std::string& key) const {
  const auto found = stored_.find(key);
  if (found == stored_.end()) return {};  // inside the pickle
  const auto& stored = found->second;
  const FileRange range{stored.data_offset, tensor_bytes({key, stored.dtype, stored.sizes})};
  return {{std::vector<int64_t>(stored.sizes.size(), 0), stored.sizes, file_names()[0], range}};
}

std::vector<std::string> TorchFile::file_names() const { return {std::filesystem::path(path()).filename().string()}; }

at::Tensor TorchFile::read_rows(const std::string& key, int64_t begin, int64_t count) {
  tensor_at(key);
  return megashard::read_rows(file_, stored_.at(key), begin, count);
}

CheckedBytes TorchFile::verify(const FaultSink& fault) { return verify_archive(archive_, file_names()[0], fault); }

}  // namespace megashard
