#pragma once

#include <cstddef>
#include <memory>
#include <thread>

#include "framework/data/data_sampler.h"
#include "framework/data/sample_dataset.h"

namespace megashard {

struct DataLoaderOptions {
  size_t prefetch = 2;             ///< batches read ahead by a thread
  double timeout_seconds = 600.0;  ///< next() throws if no batch arrives in this time
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

}  // namespace megashard
