#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "framework/batch.h"
#include "framework/training/step_reader.h"
#include "framework/training/train_step.h"
#include "framework/training/training_data.h"

namespace megashard {

/// Finds where a loss or gradient norm that is NaN or Inf comes from, by computing its step again. References outlive
/// it.
class NonfiniteSearch {
 public:
  NonfiniteSearch(MultiModalModule& model, TrainStep& step, const TrainingData& data, ProcessGroupPtr world)
      : model_(model), step_(step), data_(data), world_(std::move(world)) {}

  /// The weights were loaded from these folders, and no step has changed them.
  void note_loaded(std::string folders) { loaded_from_ = std::move(folders); }
  void note_step() { loaded_from_.clear(); }

  /// Throws `what`, where it comes from and the remedy. `batches`: micro batches of step `progress.step` + 1; empty in
  /// an evaluation. Collective.
  [[noreturn]] void fail(const std::string& what, StepReader::NotFinite which, const std::string& remedy,
                         const std::vector<Batch>& batches, const Progress& progress);

 private:
  /// Which micro batch has it, with its samples, and in which module's output or which parameter's gradient. Empty if
  /// it has not come again. Collective.
  std::string find_in_outputs(const std::vector<Batch>& batches, int64_t consumed);
  std::string find_in_gradients(const std::vector<Batch>& batches, int64_t consumed);

  MultiModalModule& model_;
  TrainStep& step_;
  const TrainingData& data_;
  ProcessGroupPtr world_;
  std::string loaded_from_;
};

}  // namespace megashard
