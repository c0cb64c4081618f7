#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/value.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Writes a step's folder from one process, one tensor at a time, so that no more than one is in
/// memory: what converters need. The folder exists (StepWriter::begin).
class FolderWriter {
 public:
  /// `tensors`: all that will be written, by their torch_dcp keys ("model.<name>",
  /// "optimizer.state.<name>.exp_avg"); torch_dist stores them under its own keys, layers stacked.
  FolderWriter(std::string folder, CheckpointFormat format, const std::vector<TensorInfo>& tensors);

  /// Each of `tensors` once, whole, in any order; throws for others, and for other sizes or dtypes.
  void write(const std::string& key, const at::Tensor& whole);
  /// A ShardedObject of torch_dist, under its whole key ("<name>/shard_<at>_<of>").
  void write_object(const std::string& key, const Value& object);
  /// Further tensors go into a file of their own (__1_0.distcp, ...); there is one from the start.
  void next_file();
  /// The plain values, nested as save_checkpoint takes them; then the metadata. Throws when a
  /// tensor has not been written. Everything is on the disk on return. Returns the files, for
  /// StepWriter::commit.
  std::vector<WrittenFile> finish(const Dict& values);

  int64_t bytes_in_file() const { return file_->position(); }

 private:
  struct Place {
    size_t entry = 0;  // in metadata_
    size_t chunk = 0;  // of that entry
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
  ShardedTensors steps_;  // of torch_dist: held back, they are mostly one number for all
  std::unordered_map<std::string, Place> places_;
  DcpMetadata metadata_;
  int files_ = 0;
  std::unique_ptr<OutputFile> file_;
  std::vector<WrittenFile> written_;
};

}  // namespace megashard
