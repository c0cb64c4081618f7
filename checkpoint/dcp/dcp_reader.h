#pragma once

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/read_queue.h"
#include "checkpoint/steps/checkpoint_format.h"
#include "checkpoint/values/value.h"
#include "parallel/collectives/process_group.h"
#include "parallel/fsdp/sharded_tensor.h"

namespace megashard {

/// Whether a tensor is a part of a plain value: torch_dcp keeps the tensors in lists of dicts (and
/// in rng_state, of any shape) apart from what is around them. False for weights and optimizer
/// state.
bool is_in_value(const DcpEntry& entry);

/// A step's folder open for reading, by one process, without communication: torch_dcp, or
/// torch_dist told as torch_dcp (see torch_dist_reader.h).
class DcpReader {
 public:
  explicit DcpReader(std::string folder);

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
  void read_chunk(const DcpEntry& entry, const DcpChunk& chunk, const ShardedTensor& into,
                  ReadQueue& reads);

  std::string folder_;
  CheckpointFormat format_;
  DcpMetadata metadata_;
  std::unordered_map<std::string, size_t> index_;
  std::unordered_map<std::string, InputFile> files_;
  std::unordered_set<std::string> checked_;
};

/// Names in order, of all ranks together: each may ask for others.
struct LoadReport {
  std::vector<std::string> missing;     ///< asked for, not in the checkpoint
  std::vector<std::string> unexpected;  ///< tensors of the checkpoint that were not asked for
};

struct LoadOptions {
  /// Missing and unexpected tensors are an error that lists them; otherwise they are only reported.
  bool strict = true;
  /// Keys to load; the others are left alone and are not unexpected. Null: all.
  std::function<bool(const std::string& key)> wanted;
  /// Looks at the plain values (nested) and at the names before any tensor is changed, and throws
  /// to refuse them: that is thrown as it is, and where it was not thrown, with the rank's number.
  std::function<void(const Dict& values, const LoadReport& report)> accept{};
  /// A folder of another format is an error that names --ckpt-format. Unset: it is detected.
  std::optional<CheckpointFormat> format{};
};

/// The tensor that a chunk's bytes hold; throws when it is not what the metadata says.
StoredTensor find_stored_chunk(const InputFile& file, const DcpEntry& entry, const DcpChunk& chunk);

/// Loads the tensors, in place, and the plain values (nested again; null: not wanted) of a
/// folder that DcpReader reads, at any world size. Collective over `group` (null: this process
/// alone). Values are read first; names and sizes are checked before any tensor is changed; an
/// error on one rank is one on all.
LoadReport load_dcp(const std::string& folder, const ShardedTensors& tensors, Dict* values,
                    const ProcessGroupPtr& group, const LoadOptions& options = {});

}  // namespace megashard
