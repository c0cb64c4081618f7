#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "framework/arguments/microbatches.h"
#include "framework/data/build_datasets.h"
#include "framework/data/sample_dataset.h"
#include "framework/training/progress.h"
#include "framework/training/rollouts.h"

namespace megashard {

enum class SamplerType {
  kSingle,  ///< one pass over the dataset, in order; drops an incomplete last micro batch
  kCyclic,  ///< endless; each epoch permutes each rank's range, with the epoch's number as the seed
};

struct SamplerOptions {
  SamplerType type = SamplerType::kSingle;
  int64_t total_samples = 0;
  /// Samples consumed by all ranks since the start of training. A resumed run continues there.
  int64_t consumed_samples = 0;
  int64_t micro_batch_size = 1;
  int64_t micro_batches_together = 1;  ///< kSingle: so many of a rank are neighbours in the data
  int64_t data_parallel_rank = 0;
  int64_t data_parallel_size = 1;
};

/// Chooses this rank's samples for each micro batch, in the order of Megatron's MegatronPretrainingSampler (kSingle)
/// and MegatronPretrainingRandomSampler (kCyclic).
class DataSampler {
 public:
  virtual ~DataSampler() = default;

  /// Sets `indices` to the next micro batch. Returns false if kSingle has no more.
  virtual bool next(std::vector<int64_t>& indices) = 0;
};

std::unique_ptr<DataSampler> make_data_sampler(const SamplerOptions& options);

struct DataLoaderOptions {
  size_t prefetch = 2;             ///< batches read ahead by a thread
  double timeout_seconds = 600.0;  ///< next() throws if no batch arrives in this time
  /// Objective::prepare; runs on the reading thread. May be null.
  std::function<void(Batch&)> prepare{};
};

/// Batches in the sampler's order. A thread reads them ahead, so that reading overlaps with compute. If reading a batch
/// fails, the next() that would have returned it throws the error. Call from one thread only. After a timeout the
/// destructor detaches the thread instead of waiting for its read.
class DataLoader {
 public:
  DataLoader(std::shared_ptr<const SampleDataset> dataset, std::unique_ptr<DataSampler> sampler,
             const BatchOptions& batch, const DataLoaderOptions& options = {});
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// The next batch. Blocks the host until it is read. Throws if the sampler has no more samples.
  Batch next();

  /// Seconds that next() has waited for data since the last call of this function.
  double take_wait_seconds();

 private:
  struct Reader;

  std::shared_ptr<Reader> reader_;  // shared with the thread
  std::thread thread_;
  double timeout_seconds_;
  double wait_seconds_ = 0;
  bool has_given_up_ = false;
};

/// How long a training is, in which batches, and how often it is evaluated.
struct RunLength {
  MicrobatchOptions batches{};
  int64_t train_iters = 0;
  std::optional<int64_t> train_samples{};  ///< decides instead of train_iters
  bool skip_train = false;
  int64_t eval_iters = 100, eval_interval = 1000;
};
RunLength run_length(const Arguments& arguments);

struct TrainingDataOptions {
  DataOptions sets{};  ///< their numbers of samples: ask_for_samples()
  BatchOptions batches{};
  DataLoaderOptions loading{};
  SamplerType order = SamplerType::kSingle;
  int64_t sequence_ranks = 1;          ///< neighbours that get the same batches
  int64_t micro_batches_together = 1;  ///< SamplerOptions::micro_batches_together
  RolloutOptions rollouts{};           ///< instead of sets, if it has a folder; reading options follow from these
};

/// The data sets of --data-path and its kin. The end of document is the caller's, because it may stand in files.
DataOptions data_options(const Arguments& arguments, int64_t vocab_size, int64_t eod_id,
                         const DiagnosticSink& sink = {});
TrainingDataOptions training_data_options(const Arguments& arguments, DataOptions sets);

/// Asks for as many samples of each split as a training of `train_iters` steps takes from `progress` on, sized
/// as by Megatron: an earlier run may have evaluated more often than this one.
void ask_for_samples(const RunLength& length, int64_t train_iters, const Progress& progress, DataOptions& data);

/// Data sets of a training, or rollouts, and this rank's micro batches of them.
class TrainingData {
 public:
  using DatasetPtr = std::shared_ptr<const SampleDataset>;

  /// `rank`: among those that the model is sharded over (ParallelGroups::sharding).
  TrainingData(TrainingDataOptions options, RunLength length, int rank, const ProcessGroupPtr& world,
               c10::Device device);

  /// Opens the data sets for the steps from `progress` on, and prints their sizes. Throws if there is nothing to learn.
  void build(int64_t train_iters, const Progress& progress, const std::function<void(const std::string&)>& print);
  /// Waits for the rollouts of `step`, or for a request to stop, which it returns; with data sets kNone at once.
  /// Collective.
  StopRequest wait_for(int64_t step, const std::function<StopRequest()>& stop_request);
  /// The micro batches of `step`, after the one before: of data sets `count`, of rollouts as many as they have. Call it
  /// after build(). Collective with rollouts.
  std::vector<Batch> next(int64_t step, int64_t count);
  /// How many samples all ranks have in a step with `count` micro batches.
  int64_t samples(int64_t count) const {
    return count * length_.batches.micro_batch_size * length_.batches.data_parallel_size;
  }
  /// Seconds for which wait_for() and next() have waited since the last call.
  double take_wait_seconds() { return rollouts_ ? rollouts_->take_wait_seconds() : train_loader_->take_wait_seconds(); }

  /// Null if not asked for.
  const DatasetPtr& valid() const { return splits_.valid; }
  const DatasetPtr& test() const { return splits_.test; }
  std::unique_ptr<DataLoader> loader(const DatasetPtr& dataset, int64_t consumed) const;
  /// "micro batch 2 of 4 (sample 17 of data/a, ...)": of the step after `consumed` samples.
  std::string microbatch_text(size_t microbatch, size_t microbatches, int64_t consumed) const;

  int64_t seq_length() const { return options_.sets.seq_length; }

 private:
  std::unique_ptr<DataSampler> sampler(const SampleDataset& dataset, int64_t consumed) const;

  TrainingDataOptions options_;
  RunLength length_;
  int rank_;
  DataSplits splits_;
  std::unique_ptr<DataLoader> train_loader_;  // null: no step is to come, or rollouts are read
  std::unique_ptr<Rollouts> rollouts_;        // null: data sets are read
};

}  // namespace megashard
