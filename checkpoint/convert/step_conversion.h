#pragma once

#include <string>
#include <unordered_set>

#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/tensor_stream.h"
#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// Content of a step that a converter writes.
struct StepContent {
  TensorStream tensors;
  Dict values;                                      ///< nested as for save_checkpoint
  const MegatronLayout* megatron_layout = nullptr;  ///< layout of the tensors
  std::unordered_set<std::string> file_starts;      ///< keys before which a new data file starts
};

/// Writes and commits a step (StepWriter::commit_converted: replaces an existing one only with `overwrite`, never moves
/// the tracker back). Holds one tensor and its sources in memory at a time. The step appears atomically.
void write_step(StepWriter step, CheckpointFormat format, const StepContent& content, const ConvertProgress& progress,
                bool overwrite);

struct StepConversion {
  std::string load_dir;  ///< a step's folder: .../iter_0000100 or .../release
  std::string save_dir;  ///< receives the step of the same name, and the tracker if it is the newest
  CheckpointFormat from = CheckpointFormat::kTorchDcp;
  CheckpointFormat to = CheckpointFormat::kTorchDist;
  const MegatronLayout* megatron_layout = nullptr;  ///< layout of the torch_dist side; null: names are kept
  bool overwrite = false;                           ///< replaces a step in save_dir, which must not be load_dir
};

/// Converts a whole step, with optimizer and values, to the other format. Verifies every byte of the source first.
void convert_step(const StepConversion& options, const ConvertProgress& progress);

}  // namespace megashard
