#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/value.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Writes a step's folder from one process, one tensor in memory at a time; used by converters. The folder must exist
/// (StepWriter::begin).
class FolderWriter {
 public:
  /// `tensors`: everything that will be written, by torch_dcp keys ("model.<name>", "optimizer.state.<name>.exp_avg").
  /// torch_dist stores them under its own keys, with layers stacked.
  FolderWriter(std::string folder, CheckpointFormat format, const std::vector<TensorInfo>& tensors);

  /// Writes a whole tensor; each of `tensors` once, in any order. Throws for other keys, sizes or dtypes.
  void write(const std::string& key, const at::Tensor& whole);
  /// Writes a ShardedObject of torch_dist under its full key ("<name>/shard_<at>_<of>").
  void write_object(const std::string& key, const Value& object);
  /// Starts a new data file (__1_0.distcp, ...) for the following tensors. The first one is open from the start.
  void next_file();
  /// Writes the plain values, nested as for save_checkpoint, and the metadata. Throws if a tensor is missing.
  /// Everything is synced on return. Returns the files, for StepWriter::commit.
  std::vector<WrittenFile> finish(const Dict& values);

  int64_t bytes_in_file() const { return file_->position(); }

 private:
  struct Place {
    size_t entry = 0;  // index in metadata_
    size_t chunk = 0;  // index in that entry
    bool stacked = false;
    bool written = false;
  };
  std::string file_name() const;
  void announce(const std::vector<TensorInfo>& tensors);
  void write_steps(const ShardedTensors& steps);
  void write_values(const Dict& values);
  void add_value_entry(const std::string& key, std::vector<Value> path, const Value& value);

  std::string folder_;
  CheckpointFormat format_;
  size_t announced_steps_ = 0;
  ShardedTensors steps_;  // torch_dist: kept until the end, because equal steps are stored once
  std::unordered_map<std::string, Place> places_;
  DcpMetadata metadata_;
  int files_ = 0;
  std::unique_ptr<OutputFile> file_;
  std::vector<WrittenFile> written_;
};

}  // namespace megashard
