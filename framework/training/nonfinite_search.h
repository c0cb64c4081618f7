#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "framework/batch.h"
#include "framework/training/step_reader.h"
#include "framework/training/train_step.h"
#include "framework/training/training_data.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// While it lives, looks at the outputs of a model's hooked modules, and finds the first that is not finite. The host
/// waits for the device at each, and layers that are computed together otherwise run one by one.
class OutputWatch {
 public:
  explicit OutputWatch(torch::nn::Module& model);
  ~OutputWatch();  ///< the modules run as before
  OutputWatch(const OutputWatch&) = delete;
  OutputWatch& operator=(const OutputWatch&) = delete;

  /// The path of that module, of the forwards since the last call: "model.layers.3.mlp"; empty: all are finite.
  std::string take_first();

 private:
  class Runner;
  struct Watched {
    HookedModule* module;
    std::shared_ptr<ForwardRunner> before;
  };
  std::shared_ptr<std::string> first_ = std::make_shared<std::string>();
  std::vector<Watched> watched_;
};

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
