#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/read_queue.h"
#include "checkpoint/values/value.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Whether a tensor is a part of a plain value: torch_dcp keeps the tensors in lists of dicts (and
/// in rng_state, of any shape) apart from what is around them. False for weights and optimizer
/// state.
bool is_in_value(const DcpEntry& entry);

/// A step's folder open for reading, by one process, without communication.
class DcpReader {
 public:
  /// Of a torch_dist folder the metadata are told as torch_dcp's (view_torch_dist).
  DcpReader(std::string folder, CheckpointFormat format, DcpMetadata metadata);

  const std::string& folder() const { return folder_; }
  CheckpointFormat format() const { return format_; }
  const std::vector<DcpEntry>& entries() const { return metadata_.entries; }
  const DcpEntry* find(const std::string& key) const;  ///< null when absent

  /// Throws when the entry's chunks leave a part of it out or lie over each other. Looked at once.
  void check_chunks(const DcpEntry& entry);
  /// Copies the saved rows that overlap with `into.local` into it, converting the dtype; reads no
  /// others. Checks the chunks first.
  void read_tensor(const DcpEntry& entry, const ShardedTensor& into);
  /// The same for many: what can go straight to its place is read by reads.run(), while this reader
  /// lives.
  void read_tensor(const DcpEntry& entry, const ShardedTensor& into, ReadQueue& reads);
  /// The whole tensor, on the CPU.
  at::Tensor read_tensor(const DcpEntry& entry);
  /// Rows [begin, begin + count) of dimension 0; the whole tensor when it has no dimensions.
  at::Tensor read_rows(const DcpEntry& entry, int64_t begin, int64_t count);
  /// Throws when read_tensor could not fill the tensor: other sizes, chunks that do not tile it, a
  /// plain value that is no number or stands against more than one element. Reads plain values, and
  /// no tensor.
  void check_fit(const DcpEntry& entry, const ShardedTensor& into);
  /// Of a tensor in a value, its record (value_tensors.h).
  Value read_value(const DcpEntry& entry);

 private:
  const InputFile& open(const DcpLocation& location, const DcpEntry& entry);
  double read_number(const DcpEntry& entry, const ShardedTensor& into);
  void read_chunk(const DcpEntry& entry, const DcpChunk& chunk, const ShardedTensor& into, ReadQueue& reads);

  std::string folder_;
  CheckpointFormat format_;
  DcpMetadata metadata_;
  std::unordered_map<std::string, size_t> index_;
  std::unordered_map<std::string, InputFile> files_;
  std::unordered_set<std::string> checked_;
};

/// The tensor that a chunk's bytes hold; throws when it is not what the metadata says.
StoredTensor find_stored_chunk(const InputFile& file, const DcpEntry& entry, const DcpChunk& chunk);

}  // namespace megashard
