#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/data/build_datasets.h"
#include "framework/data/data_loader.h"
#include "framework/training/progress.h"

namespace megashard {

/// Asks for as many samples of each split as a training of `train_iters` steps takes from `progress` on, sized
/// as by Megatron: an earlier run may have evaluated more often than this one.
void ask_for_samples(const Arguments& arguments, int64_t train_iters, const Progress& progress, DataOptions& data);

/// Data sets of a training, and this rank's micro batches of them.
class TrainingData {
 public:
  using DatasetPtr = std::shared_ptr<const SampleDataset>;

  /// `rank`: among those that the model is sharded over (ParallelGroups::sharding). `arguments` must outlive this.
  TrainingData(const Arguments& arguments, DataOptions options, int rank, c10::Device device);

  /// Opens the data sets for the steps from `progress` on, and prints their sizes. Throws if there is nothing to learn.
  void build(int64_t train_iters, const Progress& progress, const std::function<void(const std::string&)>& print);
  /// The next micro batches of the training. Call it after build().
  std::vector<Batch> next(int64_t count);
  /// Seconds for which next() has waited since the last call.
  double take_wait_seconds() { return train_loader_->take_wait_seconds(); }

  /// Null if not asked for.
  const DatasetPtr& valid() const { return splits_.valid; }
  const DatasetPtr& test() const { return splits_.test; }
  std::unique_ptr<DataLoader> loader(const DatasetPtr& dataset, int64_t consumed) const;
  /// "micro batch 2 of 4 (sample 17 of data/a, ...)": of the step after `consumed` samples.
  std::string microbatch_text(size_t microbatch, size_t microbatches, int64_t consumed) const;

  int64_t seq_length() const { return options_.seq_length; }

 private:
  std::unique_ptr<DataSampler> sampler(const SampleDataset& dataset, int64_t consumed) const;

  const Arguments& arguments_;
  DataOptions options_;
  int rank_;
  bool pins_memory_;
  DataSplits splits_;
  std::unique_ptr<DataLoader> train_loader_;  // null: no step is to come
};

}  // namespace megashard
