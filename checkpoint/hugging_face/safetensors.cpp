#include "checkpoint/hugging_face/safetensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/files/strict_json.h"

namespace megashard {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // limit of Hugging Face's reader
constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxDimensions = 64;

struct Entry {
  TensorInfo info;
  int64_t begin = 0;
  int64_t end = 0;
};

std::optional<int64_t> as_count(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto count = value.get<uint64_t>();
  if (count > uint64_t{1} << 62) return std::nullopt;
  return static_cast<int64_t>(count);
}

/// The array as non-negative integers; nullopt otherwise.
std::optional<std::vector<int64_t>> as_counts(const json& array, size_t max_count) {
  if (!array.is_array() || array.size() > max_count) return std::nullopt;
  std::vector<int64_t> counts;
  for (const auto& item : array) {
    const auto count = as_count(item);
    if (!count) return std::nullopt;
    counts.push_back(*count);
  }
  return counts;
}

Entry parse_entry(const std::string& path, const std::string& name, const json& fields) {
  const auto where = path + ": tensor \"" + name + "\" ";
  TORCH_CHECK(
      fields.is_object() && fields.contains("dtype") && fields.contains("shape") && fields.contains("data_offsets"),
      where, "lacks dtype, shape or data_offsets");
  const auto& dtype = fields["dtype"];
  TORCH_CHECK(dtype.is_string(), where, "has a dtype that is not a string");
  const auto* names = find_dtype_by_safetensors_name(dtype.get_ref<const std::string&>());
  TORCH_CHECK_NOT_IMPLEMENTED(names != nullptr, where, "has the dtype ", dtype.get_ref<const std::string&>(),
                              ", which is not known here");
  auto shape = as_counts(fields["shape"], kMaxDimensions);
  TORCH_CHECK(shape.has_value(), where, "has a shape that is not a list of sizes");
  const auto range = as_counts(fields["data_offsets"], 2);
  TORCH_CHECK(range.has_value() && range->size() == 2 && (*range)[0] <= (*range)[1], where,
              "has data_offsets that are not [begin, end]");
  Entry entry{{name, names->dtype, std::move(*shape)}, (*range)[0], (*range)[1]};
  const auto bytes = tensor_bytes(entry.info);
  TORCH_CHECK(entry.end - entry.begin == bytes, where, "has ", entry.end - entry.begin,
              " bytes of data, but its dtype and shape ", describe_sizes(entry.info.sizes), " take ", bytes);
  return entry;
}

std::string_view header_text(std::string_view file, const std::string& path) {
  TORCH_CHECK(file.size() >= kLengthBytes, path, " has ", file.size(),
              " bytes: too short for a safetensors file; fetch it again");
  TORCH_CHECK(!file.starts_with("version https://git-lfs"), path,
              " is a Git LFS pointer, not the weights; fetch them with `git lfs pull` or `hf download`");
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) length = length << 8 | static_cast<unsigned char>(file[i]);
  TORCH_CHECK(length <= kMaxHeaderBytes, path, " is no safetensors file: its header would have ", length, " bytes");
  TORCH_CHECK(length <= file.size() - kLengthBytes, path, " is truncated: a header of ", length,
              " bytes is announced, and the file has ", file.size(), "; fetch it again");
  return file.substr(kLengthBytes, length);
}

}  // namespace

SafetensorsContent parse_safetensors(std::string_view file, const std::string& path) {
  const auto text = header_text(file, path);
  const auto header = parse_strict_json(text, path + ": the header");
  TORCH_CHECK(header.is_object(), path, " is no safetensors file: its header is not a JSON object");
  SafetensorsContent content;
  std::vector<Entry> entries;
  for (const auto& [name, fields] : header.items()) {
    if (name != "__metadata__") {
      entries.push_back(parse_entry(path, name, fields));
      continue;
    }
    TORCH_CHECK(fields.is_object(), path, ": __metadata__ is not an object of strings");
    for (const auto& [key, value] : fields.items()) {
      TORCH_CHECK(value.is_string(), path, ": __metadata__ is not an object of strings");
      content.metadata.emplace(key, value.get<std::string>());
    }
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
  const auto data_begin = static_cast<int64_t>(kLengthBytes + text.size());
  const auto data_bytes = static_cast<int64_t>(file.size()) - data_begin;
  int64_t position = 0;
  for (auto& entry : entries) {
    TORCH_CHECK(entry.begin == position, path, ": the data of tensor \"", entry.info.name, "\" begins at ", entry.begin,
                " instead of ", position, ": tensors overlap or leave a hole");
    position = entry.end;
    content.tensors.push_back(std::move(entry.info));
    content.offsets.push_back(data_begin + entry.begin);
  }
  TORCH_CHECK(position == data_bytes, path, " holds ", data_bytes, " bytes of data, but its header describes ",
              position, ": the file is truncated or damaged; fetch it again");
  return content;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : file_(std::make_shared<MappedFile>(path)),
      content_(parse_safetensors({file_->data(), static_cast<size_t>(file_->size())}, path)) {
  for (size_t i = 0; i < tensors().size(); ++i) index_.emplace(tensors()[i].name, i);
}

size_t SafetensorsFile::position_of(const std::string& name) const {
  const auto found = index_.find(name);
  TORCH_CHECK_VALUE(found != index_.end(), path(), " has no tensor \"", name, "\"");
  return found->second;
}

const TensorInfo& SafetensorsFile::info(const std::string& name) const { return tensors()[position_of(name)]; }

int64_t SafetensorsFile::data_offset(const std::string& name) const { return content_.offsets[position_of(name)]; }

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto position = position_of(name);
  const auto& info = tensors()[position];
  char* data = file_->data() + content_.offsets[position];
  const auto keep_alive = [file = file_](void*) {};
  const auto alignment = c10::elementSize(info.dtype);
  if (reinterpret_cast<uintptr_t>(data) % alignment == 0) {
    return at::from_blob(data, info.sizes, keep_alive, at::TensorOptions(info.dtype));
  }
  const auto bytes = at::from_blob(data, {tensor_bytes(info)}, at::TensorOptions(at::kByte));
  return bytes.clone().view(info.dtype).view(info.sizes);
}

void SafetensorsFile::forget(const std::string& name) const {
  const auto position = position_of(name);
  file_->forget(content_.offsets[position], tensor_bytes(tensors()[position]));
}

SafetensorsLayout layout_safetensors(const std::string& path, std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata) {
  SafetensorsLayout layout{std::move(tensors), {}, {}, 0};
  std::stable_sort(layout.tensors.begin(), layout.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t position = 0;
  for (const auto& info : layout.tensors) {
    const auto* names = find_dtype(info.dtype);
    TORCH_CHECK_NOT_IMPLEMENTED(names != nullptr && names->safetensors != nullptr, "tensor \"", info.name,
                                "\" has the dtype ", info.dtype, ", which safetensors cannot hold; convert it first");
    TORCH_CHECK_VALUE(!header.contains(info.name) && info.name != "__metadata__", "tensor \"", info.name,
                      "\" is declared twice for ", path);
    const auto end = position + tensor_bytes(info);
    header[info.name] = {{"dtype", names->safetensors}, {"shape", info.sizes}, {"data_offsets", {position, end}}};
    layout.offsets.push_back(position);
    position = end;
  }
  auto text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  TORCH_CHECK(text.size() <= kMaxHeaderBytes, path, ": a header of ", text.size(),
              " bytes is more than safetensors readers take; split the file");
  layout.head.resize(kLengthBytes);
  for (size_t i = 0; i < kLengthBytes; ++i) layout.head[i] = static_cast<char>(text.size() >> (8 * i));
  layout.head += text;
  const auto data_begin = static_cast<int64_t>(layout.head.size());
  for (auto& offset : layout.offsets) offset += data_begin;
  layout.file_bytes = data_begin + position;
  return layout;
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)) {
  auto layout = layout_safetensors(path_, std::move(tensors), metadata);
  tensors_ = std::move(layout.tensors);
  file_ = std::make_unique<AtomicFile>(path_);
  file_->write(layout.head);
}

void SafetensorsWriter::write(const at::Tensor& data) {
  TORCH_CHECK_VALUE(next_ < tensors_.size(), path_, ": all declared tensors are written already");
  const auto& info = tensors_[next_];
  TORCH_CHECK_VALUE(data.scalar_type() == info.dtype && data.sizes() == at::IntArrayRef(info.sizes), "tensor \"",
                    info.name, "\" was declared as ", torch_dtype_name(info.dtype), describe_sizes(info.sizes),
                    ", got ", torch_dtype_name(data.scalar_type()), data.sizes());
  const auto contiguous = data.detach().cpu().contiguous();
  file_->write(contiguous.data_ptr(), tensor_bytes(info));
  ++next_;
}

void SafetensorsWriter::finish() {
  TORCH_CHECK_VALUE(next_ == tensors_.size(), path_, ": ", tensors_.size() - next_,
                    " declared tensors were not written, the first is \"", tensors_[next_].name, "\"");
  file_->publish();
}

}  // namespace megashard
