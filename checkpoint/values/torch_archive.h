#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// A range of a file.
struct FileRange {
  int64_t offset = 0;
  int64_t length = 0;
};

/// Whether it begins as a zip archive does: what torch.save writes, and nothing else that is read here.
bool is_zip(const InputFile& file);

/// The zip archive that torch.save writes (entries stored, never compressed), lying in a range of a
/// file. The whole directory is checked before anything else is read: every entry inside the range,
/// none over another, no name twice. Damaged archives throw an error naming file and offset.
class TorchArchive {
 public:
  struct Entry {
    int64_t size = 0;
    uint32_t crc32 = 0;
    int64_t header = 0;        ///< of its local header, from the start of the archive
    int64_t limit = 0;         ///< where the next entry or the directory begins
    std::string name_in_file;  ///< with the archive's folder in front
  };

  TorchArchive(const InputFile& file, FileRange range);

  bool contains(const std::string& name) const { return entries_.count(name) != 0; }
  /// By names without the archive's folder ("data.pkl").
  const std::map<std::string, Entry>& entries() const { return entries_; }
  FileRange locate(const std::string& name) const;  ///< where an entry's bytes lie in the file
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

/// A tensor inside a file, not read yet.
struct StoredTensor {
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t data_offset = 0;  ///< of the first element in the file

  bool is_contiguous() const;
};

/// The tensor that a record in the archive's pickle stands for (torch._utils._rebuild_tensor_v2 and
/// its like, parameters too); nothing for other values. Checks that its elements lie inside its
/// entry.
std::optional<StoredTensor> stored_tensor(const TorchArchive& archive, const Value& record);
/// The same of the tensor that torch.save(tensor) put into the range; anything else throws.
StoredTensor find_stored_tensor(const InputFile& file, FileRange range);
/// Rows [begin, begin + count) of dimension 0, reading no others (the whole tensor when it has no
/// dimensions).
at::Tensor read_rows(const InputFile& file, const StoredTensor& stored, int64_t begin, int64_t count);
/// The object that torch.save(object) put into the archive, with records for tensors.
Value read_root(const TorchArchive& archive);
/// The same of a range; small tensors come with their bytes (value_tensors.h).
Value read_stored_value(const InputFile& file, FileRange range);

/// Whether a value is what torch.save makes of a tensor, of whatever kind; stored_tensor() reads
/// the plain ones.
bool is_tensor_record(const Value& value);
/// The record of a contiguous tensor whose storage is the archive's entry data/STORAGE.
Value tensor_record(at::ScalarType dtype, const std::vector<int64_t>& sizes, const std::string& storage);

/// Append what torch.save would write, and return where it is. Tensor data goes to the file without
/// another copy when it is contiguous on the CPU.
FileRange write_stored_tensor(OutputFile& file, const at::Tensor& tensor);
FileRange write_stored_value(OutputFile& file, const Value& value);
/// The same for a value with tensor records, whose storages are numbered from 0: `storage` is asked
/// for the bytes of one after the other, as contiguous CPU tensors of any dtype.
FileRange write_stored_tree(OutputFile& file, const Value& root, size_t storages,
                            const std::function<at::Tensor(size_t number)>& storage);

}  // namespace megashard
