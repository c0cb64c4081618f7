#pragma once

#include <string>
#include <unordered_set>

#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/tensor_stream.h"
#include "checkpoint/convert/weight_layout.h"
#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// A step as a converter writes it.
struct StepContent {
  TensorStream tensors;
  Dict values;                                    ///< nested, as save_checkpoint takes them
  const WeightLayout* megatron_layout = nullptr;  ///< that the tensors have
  std::unordered_set<std::string> file_starts;    ///< keys before which a new data file begins
};

/// Writes and commits the step, beside others that may be there (StepWriter::commit_converted:
/// none is replaced unless `overwrite`, the tracker never goes back). One tensor at a time is in
/// memory, and what is read to make it. The step appears whole, or not at all.
void write_step(StepWriter step, CheckpointFormat format, const StepContent& content, const ConvertProgress& progress,
                bool overwrite);

struct StepConversion {
  std::string load_dir;  ///< a step's folder: .../iter_0000100 or .../release
  std::string save_dir;  ///< gets the step of the same name, and the tracker if it is the newest
  CheckpointFormat from = CheckpointFormat::kTorchDcp;
  CheckpointFormat to = CheckpointFormat::kTorchDist;
  const WeightLayout* megatron_layout = nullptr;  ///< of the torch_dist side; null: names stay
  bool overwrite = false;                         ///< a step of that name in save_dir, which must not be load_dir
};

/// A whole step, optimizer and values included, in the other format. Every byte of the source is
/// checked first.
void convert_step(const StepConversion& options, const ConvertProgress& progress);

}  // namespace megashard
