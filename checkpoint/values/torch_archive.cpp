#include "checkpoint/values/torch_archive.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/values/pickle_reader.h"
#include "checkpoint/values/value_tensors.h"

namespace megashard {
namespace {

constexpr int64_t kEndBytes = 22;         // end of central directory
constexpr int64_t kEndLocatorBytes = 20;  // Zip64 locator, directly before it
constexpr int64_t kEnd64Bytes = 56;
constexpr size_t kDirectoryRecordBytes = 46;
constexpr int64_t kMaxDirectoryBytes = 256 << 20;
constexpr int64_t kMaxPickleBytes = 1 << 30;
constexpr int64_t kMaxNameBytes = 4096;

/// Reads a little-endian number; callers check that it lies within `bytes`.
int64_t number(const std::string& bytes, size_t at, int width) {
  uint64_t value = 0;
  for (int i = width - 1; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
  return static_cast<int64_t>(value);
}

std::string read_text(const InputFile& file, int64_t offset, int64_t bytes) {
  std::string text(static_cast<size_t>(bytes), '\0');
  file.read_at(text.data(), bytes, offset);
  return text;
}

}  // namespace

bool is_zip(const InputFile& file) {
  std::string begin(2, '\0');
  if (file.size() < 2) return false;
  file.read_at(begin.data(), 2, 0);
  return begin == "PK";
}

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
  TORCH_CHECK(begin >= 0 && bytes >= 0 && bytes <= kMaxDirectoryBytes && begin <= range_.length &&
                  bytes <= range_.length - begin && count >= 0 &&
                  count <= bytes / static_cast<int64_t>(kDirectoryRecordBytes),
              where_, ": the archive's directory lies outside it");
  const auto directory = read_text(file_, range_.offset + begin, bytes);
  size_t at = 0;
  for (int64_t i = 0; i < count; ++i) add_entry(directory, at);
  TORCH_CHECK(at == directory.size(), where_, ": the archive's directory is damaged");
  set_limits(begin);
}

void TorchArchive::add_entry(const std::string& directory, size_t& at) {
  TORCH_CHECK(directory.size() - at >= kDirectoryRecordBytes && number(directory, at, 4) == 0x02014b50, where_,
              ": the archive's directory is damaged");
  const auto flags = number(directory, at + 8, 2);
  const auto method = number(directory, at + 10, 2);
  Entry entry{.size = number(directory, at + 24, 4),
              .crc32 = static_cast<uint32_t>(number(directory, at + 16, 4)),
              .header = number(directory, at + 42, 4),
              .limit = 0,
              .name_in_file = {}};
  auto stored_size = number(directory, at + 20, 4);
  const auto name_bytes = static_cast<size_t>(number(directory, at + 28, 2));
  const auto extra_bytes = static_cast<size_t>(number(directory, at + 30, 2));
  const auto comment_bytes = static_cast<size_t>(number(directory, at + 32, 2));
  const auto name_at = at + kDirectoryRecordBytes;
  const auto record_bytes = kDirectoryRecordBytes + name_bytes + extra_bytes + comment_bytes;
  TORCH_CHECK(record_bytes <= directory.size() - at, where_, ": the archive's directory is damaged");
  entry.name_in_file = directory.substr(name_at, name_bytes);
  TORCH_CHECK(method == 0 && (flags & 1) == 0, where_, ": entry ", entry.name_in_file,
              " is compressed or encrypted, which torch.save never does");
  const auto extra_end = name_at + name_bytes + extra_bytes;
  for (auto field = name_at + name_bytes; extra_end - field >= 4;) {
    const auto length = static_cast<size_t>(number(directory, field + 2, 2));
    if (length > extra_end - field - 4) break;
    if (number(directory, field, 2) == 1) {  // Zip64: size, stored size and header, if they exceed 32 bits
      auto value = field + 4;
      const auto next = [&](int64_t old) {
        if (old != kMax32 || field + 4 + length - value < 8) return old;
        value += 8;
        return number(directory, value - 8, 8);
      };
      entry.size = next(entry.size);
      stored_size = next(stored_size);
      entry.header = next(entry.header);
    }
    field += 4 + length;
  }
  TORCH_CHECK(stored_size == entry.size, where_, ": entry ", entry.name_in_file, " has two sizes: ", entry.size,
              " and ", stored_size);
  const auto slash = entry.name_in_file.find('/');
  const auto name = entry.name_in_file.substr(slash == std::string::npos ? 0 : slash + 1);
  const bool is_new = entries_.emplace(name, std::move(entry)).second;
  TORCH_CHECK(is_new, where_, ": entry ", name, " is there twice");
  at += record_bytes;
}

void TorchArchive::set_limits(int64_t directory) {
  std::vector<Entry*> in_order;
  for (auto& [name, entry] : entries_) in_order.push_back(&entry);
  std::sort(in_order.begin(), in_order.end(), [](const Entry* a, const Entry* b) { return a->header < b->header; });
  for (size_t i = 0; i < in_order.size(); ++i) {
    auto& entry = *in_order[i];
    entry.limit = i + 1 < in_order.size() ? in_order[i + 1]->header : directory;
    const auto front = kLocalHeaderBytes + static_cast<int64_t>(entry.name_in_file.size());
    TORCH_CHECK(entry.header >= 0 && entry.limit - entry.header >= front && entry.size >= 0 &&
                    entry.size <= entry.limit - entry.header - front,
                where_, ": entry ", entry.name_in_file, " lies outside the archive or over another");
  }
}

FileRange TorchArchive::locate(const std::string& name) const {
  const auto found = entries_.find(name);
  TORCH_CHECK(found != entries_.end(), where_, ": the archive has no entry ", name);
  const auto& entry = found->second;
  const auto& full_name = entry.name_in_file;
  const auto name_bytes = static_cast<int64_t>(full_name.size());
  const auto header = read_text(file_, range_.offset + entry.header, kLocalHeaderBytes + name_bytes);
  TORCH_CHECK(number(header, 0, 4) == 0x04034b50 && number(header, 26, 2) == name_bytes &&
                  header.compare(kLocalHeaderBytes, full_name.size(), full_name) == 0,
              where_, ": entry ", name, " has a damaged header");
  const auto data = entry.header + kLocalHeaderBytes + name_bytes + number(header, 28, 2);
  TORCH_CHECK(data <= entry.limit && entry.size <= entry.limit - data, where_, ": entry ", name,
              " lies outside the archive or over another");
  return {range_.offset + data, entry.size};
}

std::string TorchArchive::read(const std::string& name, int64_t max_bytes) const {
  const auto range = locate(name);
  TORCH_CHECK(range.length <= max_bytes, where_, ": entry ", name, " has ", range.length, " bytes; at most ", max_bytes,
              " are expected");
  return read_text(file_, range.offset, range.length);
}

Value read_root(const TorchArchive& archive) {
  if (archive.contains("byteorder")) {
    const auto order = archive.read("byteorder", kMaxNameBytes);
    TORCH_CHECK_NOT_IMPLEMENTED(order == "little", archive.where(), ": written by a ", order,
                                "-endian machine, which is not read here");
  }
  return read_pickle(archive.read("data.pkl", kMaxPickleBytes), archive.where());
}

Value read_stored_value(const InputFile& file, FileRange range) {
  const TorchArchive archive(file, range);
  return with_storages(archive, read_root(archive));
}

CheckedBytes verify_archive(const TorchArchive& archive, const std::string& item, const FaultSink& fault) {
  CheckedBytes checked;
  for (const auto& [name, entry] : archive.entries()) {
    try {
      const auto range = archive.locate(name);
      const auto sum = crc32_of(archive.file(), range.offset, range.length);
      checked.bytes += range.length;
      // 0: written with torch.serialization.set_crc32_options(False)
      if (entry.crc32 == 0 && sum != 0) {
        checked.without_checksum += range.length;
      } else if (entry.crc32 != sum) {
        fault(archive.where() + ": entry " + name + " of " + item + " is damaged (its CRC-32 is " +
              std::to_string(sum) + ", not " + std::to_string(entry.crc32) + ")");
      }
    } catch (const UnreadableError&) {
      throw;
    } catch (const c10::Error& error) {
      fault(std::string(error.what_without_backtrace()) + " (" + item + ")");
    }
  }
  return checked;
}

}  // namespace megashard
