#include "checkpoint/dcp/dcp_metadata.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/values/pickle_reader.h"
#include "checkpoint/values/pickle_writer.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {
namespace {

constexpr const char* kModule = "torch.distributed.checkpoint.metadata.";
// Pickled by megatron-core 0.15, with one more field.
constexpr const char* kMegatronRoot = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata";
constexpr const char* kStorageInfo = "torch.distributed.checkpoint.filesystem._StorageInfo";
constexpr int64_t kMaxBytes = int64_t{4} << 30;

// Writing.

Value made(const std::string& class_name, Value state) {
  return Object{class_name, Object::Opcode::kNewObj, Tuple(), std::move(state), {}, {}};
}

Value called(const std::string& name, Value argument) {
  return Object{name, Object::Opcode::kReduce, Tuple{{std::move(argument)}}, {}, {}, {}};
}

Dict dict_of(std::vector<std::pair<const char*, Value>> fields) {
  Dict dict;
  for (auto& [key, value] : fields) dict.entries.emplace_back(key, std::move(value));
  return dict;
}

Value tensor_properties(at::ScalarType dtype) {
  const auto layout = called("torch.serialization._get_layout", "torch.strided");
  const auto contiguous = called(std::string(kModule) + "_MEM_FORMAT_ENCODING", 0);
  return Object{std::string(kModule) + "TensorProperties",
                Object::Opcode::kNewObj,
                Tuple(),
                Tuple{{dtype, layout, false, contiguous, false}},
                {},
                {}};
}

Value storage_metadata(const DcpEntry& entry) {
  const auto* tensor = entry.tensor();
  if (tensor == nullptr) return made(std::string(kModule) + "BytesStorageMetadata", Value());
  List chunks;
  for (const auto& chunk : tensor->chunks) {
    chunks.items.push_back(made(std::string(kModule) + "ChunkStorageMetadata",
                                dict_of({{"offsets", TorchSize{chunk.offsets}}, {"sizes", TorchSize{chunk.sizes}}})));
  }
  return made(std::string(kModule) + "TensorStorageMetadata", dict_of({{"properties", tensor_properties(tensor->dtype)},
                                                                       {"size", TorchSize{tensor->sizes}},
                                                                       {"chunks", std::move(chunks)}}));
}

void add_location(Dict& storage, Dict index, const DcpLocation& location) {
  storage.entries.emplace_back(made(std::string(kModule) + "MetadataIndex", std::move(index)),
                               made(kStorageInfo, dict_of({{"relative_path", location.file},
                                                           {"offset", location.range.offset},
                                                           {"length", location.range.length}})));
}

void add_locations(Dict& storage, const DcpEntry& entry) {
  const auto* tensor = entry.tensor();
  if (tensor == nullptr) {
    const auto& bytes = std::get<DcpBytes>(entry.stored);
    return add_location(storage, dict_of({{"fqn", entry.key}, {"index", Value()}}), bytes.location);
  }
  int64_t index = 0;
  for (const auto& chunk : tensor->chunks) {
    add_location(storage, dict_of({{"fqn", entry.key}, {"index", index++}, {"offset", TorchSize{chunk.offsets}}}),
                 chunk.location);
  }
}

// Reading.

/// Fields of an object; throws if it is of another class.
const Value& state_of(const Value& value, const std::string& class_name) {
  const auto* object = value.object();
  TORCH_CHECK(object != nullptr && object->class_name == class_name, "expected ", class_name, ", got ", value.kind());
  return object->state;
}

std::vector<int64_t> sizes_of(const Value& value) {
  const auto* size = value.get_if<TorchSize>();
  TORCH_CHECK(size != nullptr && checked_numel(size->sizes).has_value(), "expected sizes, got ", value.kind());
  return size->sizes;
}

std::vector<int64_t> offsets_of(const Value& value) {
  const auto* offsets = value.get_if<TorchSize>();
  TORCH_CHECK(offsets != nullptr, "expected offsets, got ", value.kind());
  return offsets->sizes;
}

void check_chunk(const std::string& key, const std::vector<int64_t>& sizes, const DcpChunk& chunk) {
  bool inside = chunk.offsets.size() == sizes.size() && chunk.sizes.size() == sizes.size();
  for (size_t i = 0; inside && i < sizes.size(); ++i)
    inside = chunk.offsets[i] >= 0 && chunk.offsets[i] <= sizes[i] && chunk.sizes[i] <= sizes[i] - chunk.offsets[i];
  TORCH_CHECK(inside, "tensor ", key, " of sizes ", describe_sizes(sizes), " has a chunk at ",
              describe_sizes(chunk.offsets), " of sizes ", describe_sizes(chunk.sizes));
}

DcpTensor tensor_of(const std::string& key, const Dict& fields) {
  const auto& properties = state_of(fields.at("properties"), std::string(kModule) + "TensorProperties").as_items();
  const auto* dtype = properties.empty() ? nullptr : properties[0].get_if<at::ScalarType>();
  TORCH_CHECK(dtype != nullptr, "tensor ", key, " has ",
              properties.empty() ? "no properties" : properties[0].kind() + " for a dtype");
  DcpTensor tensor{.dtype = *dtype, .sizes = sizes_of(fields.at("size"))};
  TORCH_CHECK(checked_numel(tensor.sizes, static_cast<int64_t>(c10::elementSize(tensor.dtype))), "tensor ", key,
              " has impossible sizes ", describe_sizes(tensor.sizes));
  for (const auto& item : fields.at("chunks").as_items()) {
    const auto& chunk = state_of(item, std::string(kModule) + "ChunkStorageMetadata").as_dict();
    tensor.chunks.push_back({.offsets = offsets_of(chunk.at("offsets")), .sizes = sizes_of(chunk.at("sizes"))});
    check_chunk(key, tensor.sizes, tensor.chunks.back());
  }
  return tensor;
}

DcpLocation location_of(const Value& info) {
  const auto& fields = state_of(info, kStorageInfo).as_dict();
  const auto* transforms = fields.find("transform_descriptors");
  TORCH_CHECK_NOT_IMPLEMENTED(transforms == nullptr || transforms->is_none() || transforms->as_items().empty(),
                              "items are compressed (transform_descriptors); save without stream extensions");
  DcpLocation location{fields.at("relative_path").as_string(),
                       {fields.at("offset").as_int(), fields.at("length").as_int()}};
  TORCH_CHECK(is_plain_file_name(location.file), "\"", location.file,
              "\" is not a file of the checkpoint's own folder");
  TORCH_CHECK(location.range.offset >= 0 && location.range.length >= 0 &&
                  location.range.length <= INT64_MAX - location.range.offset,
              "an item lies at byte ", location.range.offset, " of ", location.file, " with ", location.range.length,
              " bytes");
  return location;
}

class MetadataReader {
 public:
  DcpMetadata read(const Value& root) {
    const auto* object = root.object();
    const bool is_megatrons = object != nullptr && object->class_name == kMegatronRoot;
    const auto& fields =
        is_megatrons ? object->state.as_dict() : state_of(root, std::string(kModule) + "Metadata").as_dict();
    for (const auto& [key, value] : fields.at("state_dict_metadata").as_dict().entries) add_entry(key, value);
    if (const auto* paths = fields.find("planner_data"); paths != nullptr && paths->get_if<Dict>() != nullptr) {
      for (const auto& [key, path] : paths->as_dict().entries) set_path(key, path);
    }
    if (const auto* storage = fields.find("storage_data"); storage != nullptr && !storage->is_none()) {
      for (const auto& [index, info] : storage->as_dict().entries) {
        set_location(state_of(index, std::string(kModule) + "MetadataIndex").as_dict(), location_of(info));
      }
    }
    return std::move(metadata_);
  }

 private:
  void add_entry(const Value& key, const Value& value) {
    DcpEntry entry{.key = key.as_string(), .path = {key.as_string()}, .stored = DcpBytes()};
    const auto* object = value.object();
    TORCH_CHECK(object != nullptr, "key ", entry.key, " is ", value.kind());
    if (object->class_name == std::string(kModule) + "TensorStorageMetadata") {
      entry.stored = tensor_of(entry.key, object->state.as_dict());
    } else {
      TORCH_CHECK(object->class_name == std::string(kModule) + "BytesStorageMetadata", "key ", entry.key, " is ",
                  value.kind());
    }
    const bool is_new = entries_.emplace(entry.key, metadata_.entries.size()).second;
    TORCH_CHECK(is_new, "key ", entry.key, " is there twice");
    const auto number = metadata_.entries.size();
    const auto* tensor = entry.tensor();
    for (size_t i = 0; tensor != nullptr && i < tensor->chunks.size(); ++i)
      chunks_[number].emplace(tensor->chunks[i].offsets, i);
    metadata_.entries.push_back(std::move(entry));
  }

  DcpEntry* find(const Value& key) {
    const auto found = entries_.find(key.as_string());
    return found == entries_.end() ? nullptr : &metadata_.entries[found->second];
  }

  void set_path(const Value& key, const Value& path) {
    auto* entry = find(key);
    if (entry != nullptr && !path.as_items().empty()) entry->path = path.as_items();
  }

  void set_location(const Dict& index, DcpLocation location) {
    auto* entry = find(index.at("fqn"));
    if (entry == nullptr) return;
    auto* tensor = entry->tensor();
    if (tensor == nullptr) {
      entry->stored = DcpBytes{.location = std::move(location)};
      return;
    }
    const auto* offset = index.find("offset");
    const auto offsets =
        offset == nullptr || offset->is_none() ? std::vector<int64_t>(tensor->sizes.size(), 0) : offsets_of(*offset);
    const auto& chunks = chunks_[static_cast<size_t>(entry - metadata_.entries.data())];
    const auto found = chunks.find(offsets);
    TORCH_CHECK(found != chunks.end(), "there is data of ", entry->key, " at ", describe_sizes(offsets),
                ", where it has no chunk");
    tensor->chunks[found->second].location = std::move(location);
  }

  DcpMetadata metadata_;
  std::unordered_map<std::string, size_t> entries_;
  std::unordered_map<size_t, std::map<std::vector<int64_t>, size_t>> chunks_;  // entry -> offsets -> chunk
};

}  // namespace

std::optional<TensorInfo> DcpEntry::tensor_info() const {
  if (const auto* found = tensor()) return TensorInfo{key, found->dtype, found->sizes};
  if (std::holds_alternative<DcpCommonStep>(stored)) return TensorInfo{key, at::kFloat, {}};
  return std::nullopt;
}

std::vector<DcpLocation> DcpEntry::locations() const {
  std::vector<DcpLocation> found;
  if (const auto* of_tensor = tensor())
    for (const auto& chunk : of_tensor->chunks) found.push_back(chunk.location);
  if (const auto* bytes = std::get_if<DcpBytes>(&stored)) found.push_back(bytes->location);
  if (const auto* known = std::get_if<DcpKnownValue>(&stored)) found.push_back(known->location);
  std::erase_if(found, [](const DcpLocation& location) { return location.file.empty(); });
  return found;
}

DcpMetadata read_dcp_metadata(const std::string& folder) {
  const auto path = folder + "/" + kDcpMetadataFile;
  TORCH_CHECK_VALUE(is_directory(folder), "there is no checkpoint folder ", folder);
  TORCH_CHECK(path_exists(path), folder, " has no .metadata: it is no torch_dcp checkpoint, or its save was cut short");
  return parse_dcp_metadata(read_small_file(path, kMaxBytes), path);
}

DcpMetadata parse_dcp_metadata(std::string_view pickle, const std::string& path) {
  const auto root = read_pickle(pickle, path);
  try {
    return MetadataReader().read(root);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, path, ": ", error.what_without_backtrace());
  }
}

WrittenFile write_dcp_metadata(const std::string& folder, const DcpMetadata& metadata) {
  Dict tensors;
  Dict paths;
  Dict storage;
  for (const auto& entry : metadata.entries) {
    tensors.entries.emplace_back(entry.key, storage_metadata(entry));
    paths.entries.emplace_back(entry.key, Tuple{entry.path});
    add_locations(storage, entry);
  }
  const auto root = made(std::string(kModule) + "Metadata", dict_of({{"state_dict_metadata", std::move(tensors)},
                                                                     {"planner_data", std::move(paths)},
                                                                     {"storage_data", std::move(storage)},
                                                                     {"storage_meta", Value()},
                                                                     {"version", "1.0.0"}}));
  const auto content = write_pickle(root);
  return write_file_atomically(folder + "/" + kDcpMetadataFile, content);
}

namespace {

bool is_stored(const DcpChunk& chunk) { return !chunk.location.file.empty() && chunk.location.range.length > 0; }

bool is_same_chunk(const DcpChunk& one, const DcpChunk& other) {
  return one.offsets == other.offsets && one.sizes == other.sizes && one.leading_ones == other.leading_ones &&
         one.location.file == other.location.file && one.location.range.offset == other.location.range.offset &&
         one.location.range.length == other.location.range.length;
}

bool is_same_tensor(const DcpTensor& one, const DcpTensor& other) {
  return one.dtype == other.dtype && one.sizes == other.sizes &&
         std::equal(one.chunks.begin(), one.chunks.end(), other.chunks.begin(), other.chunks.end(), is_same_chunk);
}

}  // namespace

void add_tied_keys(DcpMetadata& metadata, const TiedKeys& tied) {
  for (const auto& [key, first] : tied) {
    const auto found = std::find_if(metadata.entries.begin(), metadata.entries.end(),
                                    [&name = first](const DcpEntry& entry) { return entry.key == name; });
    TORCH_CHECK_VALUE(found != metadata.entries.end(), key, " is to share the bytes of ", first,
                      ", which is not saved");
    DcpEntry entry = *found;
    entry.key = key;
    entry.path = tensor_path(key);
    metadata.entries.push_back(std::move(entry));
  }
}

TiedKeys find_tied_keys(const std::vector<DcpEntry>& entries) {
  TiedKeys tied;
  std::map<std::pair<std::string, int64_t>, const DcpEntry*> firsts;  // (file, offset of chunk 0) -> entry
  for (const auto& entry : entries) {
    const auto* tensor = entry.tensor();
    if (tensor == nullptr || tensor->chunks.empty()) continue;
    if (!std::all_of(tensor->chunks.begin(), tensor->chunks.end(), is_stored)) continue;
    const auto& location = tensor->chunks[0].location;
    const auto [first, is_new] = firsts.emplace(std::pair(location.file, location.range.offset), &entry);
    const auto& other = *first->second;
    if (!is_new && is_same_tensor(*tensor, *other.tensor())) tied.emplace_back(entry.key, other.key);
  }
  return tied;
}

}  // namespace megashard
