#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/readers/checkpoint_reader.h"

namespace megashard {

/// A step's folder opened for reading.
class DcpReader : public CheckpointReader {
 public:
  /// The metadata of a torch_dist folder must have torch_dcp's form (view_torch_dist).
  DcpReader(std::string folder, CheckpointFormat format, DcpMetadata metadata);

  const std::vector<DcpEntry>& entries() const { return metadata_.entries; }

  std::string format() const override { return format_name(format_); }
  std::vector<StoredChunk> chunks(const std::string& key) const override;
  std::vector<std::string> file_names() const override { return names_in(path()); }
  TiedKeys tied_keys() const override { return find_tied_keys(entries()); }
  at::Tensor read_rows(const std::string& key, int64_t begin, int64_t count) override;
  /// Throws before reading if the chunks leave a part of the tensor out or overlap.
  void read_into(const std::string& key, const ShardedTensor& into, ReadQueue& reads) override;
  /// Also throws if the chunks do not tile the tensor, and for a plain value that is not a number or is requested as a
  /// tensor of several elements (optimizers differ in whether `step` is a tensor).
  void check_fit(const std::string& key, const ShardedTensor& into) override;
  Value read_value(const std::string& key) override;
  CheckedBytes verify(const FaultSink& fault) override;

 private:
  const DcpEntry& entry_at(const std::string& key) const;
  const InputFile& open(const DcpLocation& location, const std::string& key);
  void check_chunks(const std::string& key, const DcpTensor& tensor);
  double read_number(const DcpEntry& entry, const ShardedTensor& into);
  Value read_plain_value(const DcpEntry& entry);
  void read_chunk(const std::string& key, const DcpTensor& tensor, const DcpChunk& chunk, const ShardedTensor& into,
                  ReadQueue& reads);

  CheckpointFormat format_;
  DcpMetadata metadata_;
  std::unordered_map<std::string, size_t> index_;
  std::unordered_map<std::string, InputFile> files_;
  std::unordered_set<std::string> checked_;  // tensors with validated chunks
};

/// Finds the tensor in a chunk's bytes. Throws if it does not match the metadata.
StoredTensor find_stored_chunk(const InputFile& file, const std::string& key, const DcpTensor& tensor,
                               const DcpChunk& chunk);

}  // namespace megashard
