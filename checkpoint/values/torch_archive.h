#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// A range of a file.
struct FileRange {
  int64_t offset = 0;
  int64_t length = 0;
};

/// True if the file begins as a zip archive. Of the formats read here only torch.save's does.
bool is_zip(const InputFile& file);

/// A zip archive as torch.save writes it (entries stored, never compressed), in a range of a file. The directory is
/// validated before anything else is read: every entry lies inside the range, none overlap, names are unique. Damaged
/// archives throw an error with file and offset.
class TorchArchive {
 public:
  struct Entry {
    int64_t size = 0;
    uint32_t crc32 = 0;
    int64_t header = 0;        ///< offset of its local header in the archive
    int64_t limit = 0;         ///< start of the next entry or of the directory
    std::string name_in_file;  ///< name with the archive's folder
  };

  TorchArchive(const InputFile& file, FileRange range);

  bool contains(const std::string& name) const { return entries_.count(name) != 0; }
  /// Keys are names without the archive's folder ("data.pkl").
  const std::map<std::string, Entry>& entries() const { return entries_; }
  FileRange locate(const std::string& name) const;  ///< byte range of an entry's data in the file
  std::string read(const std::string& name, int64_t max_bytes) const;
  const InputFile& file() const { return file_; }
  const std::string& where() const { return where_; }

 private:
  void read_directory();
  void add_entry(const std::string& record, size_t& at);
  void set_limits(int64_t directory);

  const InputFile& file_;
  FileRange range_;
  std::string where_;
  std::map<std::string, Entry> entries_;
};

/// A tensor in a file; its data is not read yet.
struct StoredTensor {
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t data_offset = 0;  ///< offset of the first element in the file

  bool is_contiguous() const;
};

/// The tensor of a record in the archive's pickle (torch._utils._rebuild_tensor_v2 and similar, also parameters);
/// nullopt for other values. Checks that its elements lie inside its entry.
std::optional<StoredTensor> stored_tensor(const TorchArchive& archive, const Value& record);
/// As stored_tensor, for the output of torch.save(tensor) in `range`. Throws for anything else.
StoredTensor find_stored_tensor(const InputFile& file, FileRange range);
/// Reads rows [begin, begin + count) of dimension 0 and no others; the whole tensor if it has no dimensions.
at::Tensor read_rows(const InputFile& file, const StoredTensor& stored, int64_t begin, int64_t count);
/// The object that torch.save(object) put into the archive; tensors are records.
Value read_root(const TorchArchive& archive);
/// As read_root for a range; small tensors include their bytes (value_tensors.h).
Value read_stored_value(const InputFile& file, FileRange range);

/// True if torch.save writes such a record for any kind of tensor. stored_tensor() reads the plain kinds.
bool is_tensor_record(const Value& value);
/// The record of a contiguous tensor whose storage is the entry data/STORAGE.
Value tensor_record(at::ScalarType dtype, const std::vector<int64_t>& sizes, const std::string& storage);

/// Append what torch.save would write and return its range. Tensor data on the CPU that is contiguous is written
/// without another copy.
FileRange write_stored_tensor(OutputFile& file, const at::Tensor& tensor);
FileRange write_stored_value(OutputFile& file, const Value& value);
/// As write_stored_value, for a value with tensor records whose storages are numbered from 0. Calls `storage` for each
/// number in order; it returns the bytes as a contiguous CPU tensor of any dtype.
FileRange write_stored_tree(OutputFile& file, const Value& root, size_t storages,
                            const std::function<at::Tensor(size_t number)>& storage);

// Constants of the ZIP format, shared by reader and writer.
inline constexpr int64_t kLocalHeaderBytes = 30;  // without the name
inline constexpr int64_t kMax32 = 0xffffffff;     // marks a 32-bit field whose value is in the Zip64 record

/// Receives one fault: the file, the item and the reason.
using FaultSink = std::function<void(const std::string& fault)>;

/// Number of bytes checked.
struct CheckedBytes {
  int64_t bytes = 0;
  int64_t without_checksum = 0;  ///< bytes read that have no checksum

  CheckedBytes& operator+=(const CheckedBytes& part) {
    bytes += part.bytes;
    without_checksum += part.without_checksum;
    return *this;
  }
};

/// Checks the archive's entries against their CRC-32. `item` names it in faults.
CheckedBytes verify_archive(const TorchArchive& archive, const std::string& item, const FaultSink& fault);

}  // namespace megashard
