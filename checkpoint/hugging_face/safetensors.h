#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {

/// What a .safetensors file holds.
struct SafetensorsContent {
  std::vector<TensorInfo> tensors;  ///< in the order of their data
  std::vector<int64_t> offsets;     ///< of each tensor's bytes in the file
  std::map<std::string, std::string> metadata;
};

/// Reads the header of a whole file, and no data. Throws an error naming `path` and entry for
/// anything out of order.
SafetensorsContent parse_safetensors(std::string_view file, const std::string& path);

/// One .safetensors file, mapped into memory; tensors are views of the mapping and keep it alive.
/// The whole header is validated by the constructor, which throws an error naming file and entry
/// for anything out of order.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_->path(); }
  const std::vector<TensorInfo>& tensors() const { return content_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return content_.metadata; }

  bool contains(const std::string& name) const { return index_.count(name) != 0; }
  const TensorInfo& info(const std::string& name) const;  ///< throws when the file has no such tensor
  int64_t data_offset(const std::string& name) const;     ///< of its first byte in the file
  /// CPU tensor; its rows are read from the disk when touched (so narrow first). Writing to it
  /// leaves the file alone.
  at::Tensor tensor(const std::string& name) const;
  /// Gives back the memory that reading the tensor took; a view of it reads the file again.
  void forget(const std::string& name) const;

 private:
  size_t position_of(const std::string& name) const;

  std::shared_ptr<MappedFile> file_;
  SafetensorsContent content_;
  std::unordered_map<std::string, size_t> index_;
};

/// How a file of these tensors begins, and where the data of each lies in it.
struct SafetensorsLayout {
  std::vector<TensorInfo> tensors;  ///< widest dtypes first, so that every one is aligned
  std::vector<int64_t> offsets;     ///< of each one's data, from the start of the file
  std::string head;                 ///< everything before the data
  int64_t file_bytes = 0;
};

/// `path` is for messages. Metadata defaults to {"format": "pt"}, which transformers asks for.
/// Throws for dtypes that the format lacks (complex128), and names that come twice.
SafetensorsLayout layout_safetensors(const std::string& path, std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

/// Writes one file tensor by tensor: the header comes from what is declared, the data follows in
/// the order of tensors(). The file appears under its name when finish() has returned.
class SafetensorsWriter {
 public:
  SafetensorsWriter(std::string path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

  /// As declared, in the layout's order.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  /// The data of the next of tensors(): of its dtype and sizes, on any device.
  void write(const at::Tensor& data);
  void finish();

 private:
  std::string path_;
  std::vector<TensorInfo> tensors_;
  std::unique_ptr<AtomicFile> file_;
  size_t next_ = 0;
};

}  // namespace megashard
