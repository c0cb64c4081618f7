#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// Where one item (a torch archive) lies in a checkpoint folder.
struct DcpLocation {
  std::string file;  ///< a name inside the folder; empty: the metadata does not say
  FileRange range;
};

/// A saved box of a tensor.
struct DcpChunk {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  DcpLocation location;
  int leading_ones = 0;  ///< axes of length 1 that the stored item has before `sizes` (stacks)
};

/// One key of a checkpoint: a tensor in chunks, or a plain value.
struct DcpEntry {
  std::string key;
  std::vector<Value> path;  ///< strings and list indices: the key's place in the nested state dict
  bool is_tensor = false;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes;
  std::vector<DcpChunk> chunks;
  DcpLocation location;             ///< of a plain value
  std::optional<Value> value = {};  ///< known already: plain ones of common.pt, scalar tensors
  bool is_sharded_object = false;   ///< stored as Megatron does: a list of this one object
};

/// torch.distributed.checkpoint.metadata.Metadata: the content of a folder's .metadata file.
struct DcpMetadata {
  std::vector<DcpEntry> entries;
};

/// Reads DIR/.metadata as plain data; throws a sentence for a missing, damaged or inconsistent one.
DcpMetadata read_dcp_metadata(const std::string& folder);
/// The same of such a file's content; `path` stands in messages.
DcpMetadata parse_dcp_metadata(std::string_view pickle, const std::string& path);
/// Writes DIR/.metadata at once (.metadata.tmp, fsync, rename), after all that it names.
WrittenFile write_dcp_metadata(const std::string& folder, const DcpMetadata& metadata);

}  // namespace megashard
