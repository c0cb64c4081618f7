#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// Where one item (a torch archive) lies in a checkpoint folder.
struct DcpLocation {
  std::string file{};  ///< a name inside the folder; empty: the metadata does not say
  FileRange range{};
};

/// A saved box of a tensor.
struct DcpChunk {
  std::vector<int64_t> offsets{};
  std::vector<int64_t> sizes{};
  DcpLocation location{};
  int leading_ones = 0;  ///< axes of length 1 that the stored item has before `sizes` (stacks)
};

/// A tensor in chunks (TensorStorageMetadata).
struct DcpTensor {
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes{};
  std::vector<DcpChunk> chunks{};
};

/// A plain value in an item of its own (BytesStorageMetadata).
struct DcpBytes {
  DcpLocation location{};
  bool is_sharded_object = false;  ///< stored as Megatron does: a list of this one object
};

/// A plain value of torch_dist that has been read already, with others.
struct DcpKnownValue {
  Value value{};
  DcpLocation location{};  ///< of the item that all of them lie in
};

/// The step of one weight's optimizer state, which torch_dist keeps once for all of them: a float32
/// tensor without dimensions.
struct DcpCommonStep {
  Value value{};
};

/// One key of a checkpoint.
struct DcpEntry {
  std::string key{};
  std::vector<Value> path{};  ///< strings and list indices: the key's place in the nested state dict
  std::variant<DcpTensor, DcpBytes, DcpKnownValue, DcpCommonStep> stored{};

  /// Null for plain values, and for a common step.
  const DcpTensor* tensor() const { return std::get_if<DcpTensor>(&stored); }
  DcpTensor* tensor() { return std::get_if<DcpTensor>(&stored); }
  /// Of a tensor or a common step; nothing for plain values.
  std::optional<TensorInfo> tensor_info() const;
  /// Of its items, as far as the metadata says them.
  std::vector<DcpLocation> locations() const;
};

/// torch.distributed.checkpoint.metadata.Metadata: the content of a folder's .metadata file.
struct DcpMetadata {
  std::vector<DcpEntry> entries;
};

/// Reads DIR/.metadata as plain data; throws for a missing, damaged or inconsistent one.
DcpMetadata read_dcp_metadata(const std::string& folder);
/// The same of such a file's content; `path` stands in messages.
DcpMetadata parse_dcp_metadata(std::string_view pickle, const std::string& path);
/// Writes DIR/.metadata at once (.metadata.tmp, fsync, rename), after all that it names.
WrittenFile write_dcp_metadata(const std::string& folder, const DcpMetadata& metadata);

}  // namespace megashard
