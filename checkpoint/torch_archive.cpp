#include "checkpoint/torch_archive.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "checkpoint/pickle_reader.h"
#include "checkpoint/tensor_info.h"
#include "checkpoint/zip_layout.h"

namespace megashard {
namespace {

constexpr int64_t kEndBytes = 22;         // end of central directory
constexpr int64_t kEndLocatorBytes = 20;  // Zip64 locator, just before
constexpr int64_t kEnd64Bytes = 56;
constexpr size_t kDirectoryRecordBytes = 46;
constexpr int64_t kMostDirectoryBytes = 256 << 20;
constexpr int64_t kMostPickleBytes = 1 << 30;
constexpr int64_t kMostNameBytes = 4096;

/// Little-endian number; callers have checked that it lies within `bytes`.
int64_t number(const std::string& bytes, size_t at, int width) {
  uint64_t value = 0;
  for (int i = width - 1; i >= 0; --i)
    value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
  return static_cast<int64_t>(value);
}

std::string read_text(const InputFile& file, int64_t offset, int64_t bytes) {
  std::string text(static_cast<size_t>(bytes), '\0');
  file.read_at(text.data(), bytes, offset);
  return text;
}

}  // namespace

TorchArchive::TorchArchive(const InputFile& file, FileRange range)
    : file_(file), range_(range), where_(file.path() + " at byte " + std::to_string(range.offset)) {
  TORCH_CHECK(range.offset >= 0 && range.length >= kEndBytes && range.offset <= file.size() &&
                  range.length <= file.size() - range.offset,
              file.path(), " has ", file.size(), " bytes, but an item of ", range.length, " bytes should be at byte ",
              range.offset, ": the file is truncated or belongs to another checkpoint");
  read_directory();
}

void TorchArchive::read_directory() {
  const auto end = read_text(file_, range_.offset + range_.length - kEndBytes, kEndBytes);
  TORCH_CHECK(number(end, 0, 4) == 0x06054b50, where_, ": there is no torch archive (its end record is missing)");
  int64_t count = number(end, 10, 2);
  int64_t bytes = number(end, 12, 4);
  int64_t begin = number(end, 16, 4);
  const auto locator_at = range_.length - kEndBytes - kEndLocatorBytes;
  if (locator_at >= kEnd64Bytes) {
    const auto locator = read_text(file_, range_.offset + locator_at, kEndLocatorBytes);
    if (number(locator, 0, 4) == 0x07064b50) {
      const auto at = number(locator, 8, 8);
      TORCH_CHECK(at >= 0 && at <= locator_at - kEnd64Bytes, where_, ": the archive's Zip64 record lies outside it");
      const auto end64 = read_text(file_, range_.offset + at, kEnd64Bytes);
      TORCH_CHECK(number(end64, 0, 4) == 0x06064b50, where_, ": the archive's Zip64 record is damaged");
      count = number(end64, 32, 8);
      bytes = number(end64, 40, 8);
      begin = number(end64, 48, 8);
    }
  }
  TORCH_CHECK(begin >= 0 && bytes >= 0 && bytes <= kMostDirectoryBytes && begin <= range_.length &&
                  bytes <= range_.length - begin && count >= 0 &&
                  count <= bytes / static_cast<int64_t>(kDirectoryRecordBytes),
              where_, ": the archive's directory lies outside it");
  const auto directory = read_text(file_, range_.offset + begin, bytes);
  size_t at = 0;
  for (int64_t i = 0; i < count; ++i) add_entry(directory, at);
}

void TorchArchive::add_entry(const std::string& directory, size_t& at) {
  TORCH_CHECK(directory.size() - at >= kDirectoryRecordBytes && number(directory, at, 4) == 0x02014b50, where_,
              ": the archive's directory is damaged");
  const auto method = number(directory, at + 10, 2);
  Entry entry{number(directory, at + 42, 4), number(directory, at + 24, 4)};
  const auto name_bytes = static_cast<size_t>(number(directory, at + 28, 2));
  const auto extra_bytes = static_cast<size_t>(number(directory, at + 30, 2));
  const auto comment_bytes = static_cast<size_t>(number(directory, at + 32, 2));
  const auto name_at = at + kDirectoryRecordBytes;
  const auto record_bytes = kDirectoryRecordBytes + name_bytes + extra_bytes + comment_bytes;
  TORCH_CHECK(record_bytes <= directory.size() - at, where_, ": the archive's directory is damaged");
  const auto name = directory.substr(name_at, name_bytes);
  TORCH_CHECK(method == 0, where_, ": entry ", name, " is compressed, which torch.save never does");
  const auto extra_end = name_at + name_bytes + extra_bytes;
  for (auto field = name_at + name_bytes; extra_end - field >= 4;) {
    const auto length = static_cast<size_t>(number(directory, field + 2, 2));
    if (length > extra_end - field - 4) break;
    if (number(directory, field, 2) ==
        1) {  // Zip64: those of size, stored size, header that do not fit 32 bits
      auto value = field + 4;
      const auto next = [&](int64_t old) {
        if (old != kMost32 || field + 4 + length - value < 8) return old;
        value += 8;
        return number(directory, value - 8, 8);
      };
      entry.size = next(entry.size);
      next(number(directory, at + 20, 4));
      entry.header = next(entry.header);
    }
    field += 4 + length;
  }
  const auto slash = name.find('/');
  if (slash != std::string::npos) entries_[name.substr(slash + 1)] = entry;
  at += record_bytes;
}

FileRange TorchArchive::locate(const std::string& name) const {
  const auto found = entries_.find(name);
  TORCH_CHECK(found != entries_.end(), where_, ": the archive has no entry ", name);
  const auto& entry = found->second;
  TORCH_CHECK(entry.header >= 0 && entry.header <= range_.length - kLocalHeaderBytes && entry.size >= 0, where_,
              ": entry ", name, " lies outside the archive");
  const auto header = read_text(file_, range_.offset + entry.header, kLocalHeaderBytes);
  TORCH_CHECK(number(header, 0, 4) == 0x04034b50, where_, ": entry ", name, " has a damaged header");
  const auto data =
      entry.header + kLocalHeaderBytes + number(header, 26, 2) + number(header, 28, 2);
  TORCH_CHECK(data <= range_.length && entry.size <= range_.length - data, where_, ": entry ", name,
              " lies outside the archive");
  return {range_.offset + data, entry.size};
}

std::string TorchArchive::read(const std::string& name, int64_t most_bytes) const {
  const auto range = locate(name);
  TORCH_CHECK(range.length <= most_bytes, where_, ": entry ", name, " has ", range.length, " bytes; at most ",
              most_bytes, " are expected");
  return read_text(file_, range.offset, range.length);
}

namespace {

Value read_root(const TorchArchive& archive) {
  if (archive.contains("byteorder")) {
    const auto order = archive.read("byteorder", kMostNameBytes);
    TORCH_CHECK(order == "little", archive.where(), ": written by a ", order, "-endian machine, which is not read here");
  }
  return read_pickle(archive.read("data.pkl", kMostPickleBytes), archive.where());
}

std::vector<int64_t> archived_sizes(const Value& value) {
  if (const auto* size = value.get_if<TorchSize>()) return size->sizes;
  std::vector<int64_t> sizes;
  for (const auto& item : value.as_items()) sizes.push_back(item.as_int());
  return sizes;
}

/// The arguments of _rebuild_tensor_v2 or _v3, inside a Parameter too.
const std::vector<Value>& rebuild_arguments(const Value& root, const std::string& where) {
  const auto* object = root.object();
  if (object != nullptr && object->class_name == "torch._utils._rebuild_parameter") {
    object = object->arguments.as_items().at(0).object();
  }
  TORCH_CHECK(object != nullptr && (object->class_name == "torch._utils._rebuild_tensor_v2" ||
                                    object->class_name == "torch._utils._rebuild_tensor_v3"),
              where, ": expected a plain tensor, found ", root.kind());
  const auto& arguments = object->arguments.as_items();
  TORCH_CHECK(arguments.size() >= 6, where, ": the tensor's record is incomplete");
  return arguments;
}

at::ScalarType dtype_of(const std::vector<Value>& arguments, const Value& storage_class,
                        const std::string& where) {
  const auto* global = storage_class.get_if<Global>();
  TORCH_CHECK(global != nullptr, where, ": the tensor's storage has no class");
  if (global->name == "torch.storage.UntypedStorage") {
    const auto* dtype = arguments.size() > 6 ? arguments[6].get_if<at::ScalarType>() : nullptr;
    TORCH_CHECK(dtype != nullptr, where, ": the tensor has no dtype");
    return *dtype;
  }
  const auto* names =
      global->name.starts_with("torch.") ? find_dtype_by_storage(global->name.substr(6)) : nullptr;
  TORCH_CHECK(names != nullptr, where, ": tensors of ", global->name, " are not read here");
  return names->dtype;
}

/// One past the last element, in elements from the first; nothing on overflow or a negative stride.
std::optional<int64_t> span_of(const StoredTensor& stored) {
  if (!checked_numel(stored.sizes, 16)) return std::nullopt;
  int64_t span = 1;
  for (size_t i = 0; i < stored.sizes.size(); ++i) {
    if (stored.sizes[i] == 0) return 0;
    int64_t reach = 0;
    if (stored.strides[i] < 0 ||
        __builtin_mul_overflow(stored.sizes[i] - 1, stored.strides[i], &reach) ||
        __builtin_add_overflow(span, reach, &span)) {
      return std::nullopt;
    }
  }
  return span;
}

}  // namespace

bool StoredTensor::is_contiguous() const {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1 && strides[i] != expected) return false;
    expected *= std::max<int64_t>(sizes[i], 1);
  }
  return true;
}

StoredTensor find_stored_tensor(const InputFile& file, FileRange range) {
  const TorchArchive archive(file, range);
  const auto root = read_root(archive);
  const auto& where = archive.where();
  const auto& arguments = rebuild_arguments(root, where);
  const auto* storage = arguments[0].object();
  TORCH_CHECK(storage != nullptr && storage->making == Object::Making::kPersistent, where,
              ": the tensor has no storage");
  const auto& identity = storage->arguments.as_items();
  TORCH_CHECK(identity.size() >= 5 && identity[0] == Value("storage"), where, ": the tensor's storage is unknown");
  StoredTensor stored{dtype_of(arguments, identity[1], where), archived_sizes(arguments[2]),
                      archived_sizes(arguments[3]), 0};
  const auto first = arguments[1].as_int();
  const auto bytes = archive.locate("data/" + identity[2].as_string());
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(stored.dtype));
  const auto elements = bytes.length / element_bytes;
  const auto span = stored.strides.size() == stored.sizes.size() ? span_of(stored) : std::nullopt;
  TORCH_CHECK(span.has_value() && first >= 0 && first <= elements && *span <= elements - first, where,
              ": a tensor of sizes ", describe_sizes(stored.sizes), " and strides ", describe_sizes(stored.strides),
              " does not fit its ", bytes.length, " bytes of data");
  stored.data_offset = bytes.offset + first * element_bytes;
  return stored;
}

at::Tensor read_rows(const InputFile& file, const StoredTensor& stored, int64_t begin,
                     int64_t count) {
  const auto options = at::TensorOptions(stored.dtype);
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(stored.dtype));
  auto sizes = stored.sizes;
  auto offset = stored.data_offset;
  if (!sizes.empty()) {
    TORCH_CHECK(begin >= 0 && count >= 0 && count <= sizes[0] - begin, "rows ", begin, " to ", begin + count,
                " of a tensor with ", sizes[0], " rows");
    sizes[0] = count;
    offset += begin * stored.strides[0] * element_bytes;
  }
  const StoredTensor rows{stored.dtype, sizes, stored.strides, offset};
  if (rows.is_contiguous()) {
    auto tensor = at::empty(sizes, options);
    if (tensor.numel() > 0)
      file.read_at(tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()), offset);
    return tensor;
  }
  auto elements = at::empty({*span_of(rows)}, options);
  if (elements.numel() > 0)
    file.read_at(elements.data_ptr(), static_cast<int64_t>(elements.nbytes()), offset);
  return elements.as_strided(sizes, stored.strides);
}

Value read_stored_value(const InputFile& file, FileRange range) {
  return read_root(TorchArchive(file, range));
}

}  // namespace megashard
