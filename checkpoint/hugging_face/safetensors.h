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
#include "checkpoint/files/output_file.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {

/// Content of a .safetensors file.
struct SafetensorsContent {
  std::vector<TensorInfo> tensors;  ///< in the order of their data
  std::vector<int64_t> offsets;     ///< of each tensor's bytes in the file
  std::map<std::string, std::string> metadata;
};

/// Parses the header of a whole file without reading data. Throws an error with `path` and entry if it is invalid.
SafetensorsContent parse_safetensors(std::string_view file, const std::string& path);

/// A .safetensors file mapped into memory. Tensors are views of the mapping and keep it alive. The constructor
/// validates the whole header and throws an error with file and entry if it is invalid.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_->path(); }
  const std::vector<TensorInfo>& tensors() const { return content_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return content_.metadata; }

  bool contains(const std::string& name) const { return index_.count(name) != 0; }
  const TensorInfo& info(const std::string& name) const;  ///< throws if the file has no such tensor
  int64_t data_offset(const std::string& name) const;     ///< offset of its first byte in the file
  /// A CPU tensor whose rows are read from disk on access (so narrow first). Writes to it do not change the file.
  at::Tensor tensor(const std::string& name) const;
  /// Releases the memory of the tensor's pages; views read the file again.
  void forget(const std::string& name) const;

 private:
  size_t position_of(const std::string& name) const;

  std::shared_ptr<MappedFile> file_;
  SafetensorsContent content_;
  std::unordered_map<std::string, size_t> index_;
};

/// Header of a new file and the offset of each tensor's data.
struct SafetensorsLayout {
  std::vector<TensorInfo> tensors;  ///< widest dtypes first, for alignment
  std::vector<int64_t> offsets;     ///< of each tensor's data, from the start of the file
  std::string head;                 ///< everything before the data
  int64_t file_bytes = 0;
};

/// `path` is used in messages. Metadata defaults to {"format": "pt"}, which transformers requires. Throws for dtypes
/// that the format lacks (complex128) and for duplicate names.
SafetensorsLayout layout_safetensors(const std::string& path, std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

/// Writes a file tensor by tensor: first the header from the declared tensors, then the data in the order of tensors().
/// The file appears when finish() returns.
class SafetensorsWriter {
 public:
  SafetensorsWriter(std::string path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

  /// The declared tensors, in the layout's order.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  /// Writes the data of the next of tensors(): same dtype and sizes, any device.
  void write(const at::Tensor& data);
  void finish();

 private:
  std::string path_;
  std::vector<TensorInfo> tensors_;
  std::unique_ptr<AtomicFile> file_;
  size_t next_ = 0;
};

}  // namespace megashard
