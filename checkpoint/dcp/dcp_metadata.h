#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "checkpoint/files/output_file.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// Location of an item (a torch archive) in a checkpoint folder.
struct DcpLocation {
  std::string file{};  ///< name inside the folder; empty: not in the metadata
  FileRange range{};
};

/// A saved box of a tensor.
struct DcpChunk {
  std::vector<int64_t> offsets{};
  std::vector<int64_t> sizes{};
  DcpLocation location{};
  int leading_ones = 0;  ///< axes of length 1 in the stored item before `sizes` (stacked layers)
};

/// A tensor stored as chunks (TensorStorageMetadata).
struct DcpTensor {
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes{};
  std::vector<DcpChunk> chunks{};
};

/// A plain value stored as its own item (BytesStorageMetadata).
struct DcpBytes {
  DcpLocation location{};
  bool is_sharded_object = false;  ///< stored as by Megatron: a list with this object
};

/// A plain value of torch_dist that has been read already, together with others.
struct DcpKnownValue {
  Value value{};
  DcpLocation location{};  ///< item that contains all of them
};

/// The step of a weight's optimizer state, which torch_dist stores once for all weights: a float32 scalar tensor.
struct DcpCommonStep {
  Value value{};
};

/// One key of a checkpoint.
struct DcpEntry {
  std::string key{};
  std::vector<Value> path{};  ///< strings and list indices: position in the nested state dict
  std::variant<DcpTensor, DcpBytes, DcpKnownValue, DcpCommonStep> stored{};

  /// Null for plain values, and for a common step.
  const DcpTensor* tensor() const { return std::get_if<DcpTensor>(&stored); }
  DcpTensor* tensor() { return std::get_if<DcpTensor>(&stored); }
  /// The tensor or common step; nullopt for plain values.
  std::optional<TensorInfo> tensor_info() const;
  /// Locations of its items that the metadata contains.
  std::vector<DcpLocation> locations() const;
};

/// Content of a .metadata file (torch.distributed.checkpoint.metadata.Metadata).
struct DcpMetadata {
  std::vector<DcpEntry> entries;
};

/// Reads DIR/.metadata as plain data. Throws if it is missing, damaged or inconsistent.
DcpMetadata read_dcp_metadata(const std::string& folder);
/// As read_dcp_metadata, from the content of the file; `path` is used in messages.
DcpMetadata parse_dcp_metadata(std::string_view pickle, const std::string& path);
/// Writes DIR/.metadata atomically (.metadata.tmp, fsync, rename). Call it after all files that it names are written.
WrittenFile write_dcp_metadata(const std::string& folder, const DcpMetadata& metadata);

/// Adds an entry with the same chunks for each additional key. Throws if the stored key has no entry.
void add_tied_keys(DcpMetadata& metadata, const TiedKeys& tied);
/// Inverse: finds entries with the same chunks, all of them stored, as an earlier entry.
TiedKeys find_tied_keys(const std::vector<DcpEntry>& entries);

}  // namespace megashard
