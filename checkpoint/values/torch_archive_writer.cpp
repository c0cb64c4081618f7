#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>

#include "checkpoint/files/crc32.h"
#include "checkpoint/values/pickle_writer.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_tensors.h"

namespace megashard {
namespace {

constexpr int64_t kAlignment = 64;   // of every entry's data, in the archive
constexpr int64_t kMax16 = 0xffff;   // marks a 16-bit field whose value is in the Zip64 record
constexpr uint16_t kFlags = 0x0808;  // sizes follow the data; names are UTF-8

class ArchiveWriter {
 public:
  explicit ArchiveWriter(OutputFile& file) : file_(file), start_(file.position()) {}

  void add(const std::string& short_name, const void* data, int64_t bytes) {
    Entry entry{"archive/" + short_name, position(), bytes, 0};
    const auto unpadded = position() + kLocalHeaderBytes + static_cast<int64_t>(entry.name.size()) + 4;
    const auto padding = (kAlignment - unpadded % kAlignment) % kAlignment;
    Record header;
    header.add(0x04034b50, 4).add(0, 2).add(kFlags, 2).add(0, 2).add(0, 4).add(0, 4).add(0, 4).add(0, 4);
    header.add(static_cast<int64_t>(entry.name.size()), 2).add(padding + 4, 2).add(entry.name);
    header.add("FB").add(padding, 2).add(std::string(static_cast<size_t>(padding), 'Z'));
    file_.write(header.bytes);
    entry.crc = file_.write(data, bytes);
    const int width = bytes > kMax32 ? 8 : 4;
    file_.write(Record().add(0x08074b50, 4).add(entry.crc, 4).add(bytes, width).add(bytes, width).bytes);
    entries_.push_back(std::move(entry));
  }
  void add(const std::string& short_name, const std::string& text) {
    add(short_name, text.data(), static_cast<int64_t>(text.size()));
  }

  FileRange finish() {
    add("version", "3\n");
    add(".data/serialization_id", serialization_id());
    const auto directory = position();
    for (const auto& entry : entries_) file_.write(directory_record(entry));
    const auto directory_bytes = position() - directory;
    const auto end = position();
    const auto count = static_cast<int64_t>(entries_.size());
    Record record;
    record.add(0x06064b50, 4).add(44, 8).add(0x031e, 2).add(45, 2).add(0, 4).add(0, 4);
    record.add(count, 8).add(count, 8).add(directory_bytes, 8).add(directory, 8);
    record.add(0x07064b50, 4).add(0, 4).add(end, 8).add(1, 4);
    record.add(0x06054b50, 4).add(0, 4).add(std::min(count, kMax16), 2).add(std::min(count, kMax16), 2);
    record.add(std::min(directory_bytes, kMax32), 4).add(std::min(directory, kMax32), 4).add(0, 2);
    file_.write(record.bytes);
    return {start_, position()};
  }

 private:
  struct Entry {
    std::string name;
    int64_t header;  // from the start of the archive
    int64_t bytes;
    uint32_t crc;
  };
  struct Record {
    std::string bytes;
    Record& add(int64_t value, int width) {
      for (int i = 0; i < width; ++i) bytes += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
      return *this;
    }
    Record& add(const std::string& text) {
      bytes += text;
      return *this;
    }
  };

  int64_t position() const { return file_.position() - start_; }

  static std::string directory_record(const Entry& entry) {
    const bool large = entry.bytes > kMax32;
    const bool far = entry.header > kMax32;
    Record extra;
    if (large) extra.add(entry.bytes, 8).add(entry.bytes, 8);
    if (far) extra.add(entry.header, 8);
    const auto extra_bytes = static_cast<int64_t>(extra.bytes.size());
    Record record;
    record.add(0x02014b50, 4).add(0, 2).add(0, 2).add(kFlags, 2).add(0, 2).add(0, 4).add(entry.crc, 4);
    record.add(large ? kMax32 : entry.bytes, 4).add(large ? kMax32 : entry.bytes, 4);
    record.add(static_cast<int64_t>(entry.name.size()), 2).add(extra_bytes == 0 ? 0 : extra_bytes + 4, 2);
    record.add(0, 2).add(0, 2).add(0, 2).add(0, 4).add(far ? kMax32 : entry.header, 4).add(entry.name);
    if (extra_bytes > 0) record.add(1, 2).add(extra_bytes, 2).add(extra.bytes);
    return record.bytes;
  }

  /// 40 digits computed from the content, as by torch.
  std::string serialization_id() const {
    uint32_t names = 0;
    uint32_t contents = 0;
    for (const auto& entry : entries_) {
      names = crc32(names, entry.name.data(), static_cast<int64_t>(entry.name.size()));
      contents = crc32(contents, &entry.crc, sizeof entry.crc);
    }
    char digits[48];
    std::snprintf(digits, sizeof digits, "%020u%020u", names, contents);
    return digits;
  }

  OutputFile& file_;
  int64_t start_;
  std::vector<Entry> entries_;
};

Tuple tuple_of(const std::vector<int64_t>& numbers) {
  Tuple tuple;
  for (const auto number : numbers) tuple.items.emplace_back(number);
  return tuple;
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  return strides;
}

void add_preamble(ArchiveWriter& archive, const Value& root) {
  archive.add("data.pkl", write_pickle(root));
  archive.add(".format_version", "1");
  archive.add(".storage_alignment", "64");
  archive.add("byteorder", "little");
}

}  // namespace

/// torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks), or _v3 with the dtype appended
/// for dtypes without a storage class.
Value tensor_record(at::ScalarType dtype, const std::vector<int64_t>& sizes, const std::string& storage_name) {
  const auto* names = find_dtype(dtype);
  TORCH_CHECK(names != nullptr, "a tensor of dtype ", dtype, " has no place in a checkpoint");
  const bool typed = names->storage != nullptr;
  const Global storage_class{typed ? std::string("torch.") + names->storage : "torch.storage.UntypedStorage"};
  const auto bytes = tensor_bytes({storage_name, dtype, sizes});
  const auto units = typed ? bytes / static_cast<int64_t>(c10::elementSize(dtype)) : bytes;
  const Object storage{
      "", Object::Opcode::kPersId, Tuple{{"storage", storage_class, storage_name, "cpu", units}}, {}, {}, {}};
  const Object no_hooks{"collections.OrderedDict", Object::Opcode::kReduce, Tuple(), {}, {}, {}};
  Tuple arguments{{storage, 0, tuple_of(sizes), tuple_of(contiguous_strides(sizes)), false, no_hooks}};
  if (!typed) arguments.items.emplace_back(dtype);
  return Object{typed ? "torch._utils._rebuild_tensor_v2" : "torch._utils._rebuild_tensor_v3",
                Object::Opcode::kReduce,
                std::move(arguments),
                {},
                {},
                {}};
}

FileRange write_stored_tensor(OutputFile& file, const at::Tensor& tensor) {
  const auto data = tensor.detach().cpu().contiguous();
  ArchiveWriter archive(file);
  add_preamble(archive, tensor_record(data.scalar_type(), data.sizes().vec(), "0"));
  archive.add("data/0", data.const_data_ptr(), static_cast<int64_t>(data.nbytes()));
  return archive.finish();
}

FileRange write_stored_value(OutputFile& file, const Value& value) {
  const auto [root, storages] = number_storages(value);
  ArchiveWriter archive(file);
  add_preamble(archive, root);
  for (size_t i = 0; i < storages.size(); ++i) archive.add("data/" + std::to_string(i), storages[i]);
  return archive.finish();
}

FileRange write_stored_tree(OutputFile& file, const Value& root, size_t storages,
                            const std::function<at::Tensor(size_t number)>& storage) {
  ArchiveWriter archive(file);
  add_preamble(archive, root);
  for (size_t number = 0; number < storages; ++number) {
    const auto data = storage(number);
    archive.add("data/" + std::to_string(number), data.const_data_ptr(), static_cast<int64_t>(data.nbytes()));
  }
  return archive.finish();
}

}  // namespace megashard
