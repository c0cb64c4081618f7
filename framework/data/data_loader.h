#pragma once

#include <cstddef>
#include <memory>
#include <thread>

#include "framework/data/data_sampler.h"
#include "framework/data/sample_dataset.h"

namespace megashard {

struct DataLoaderOptions {
  size_t prefetch = 2;             ///< batches read ahead by a thread
  double timeout_seconds = 600.0;  ///< next() gives up after so long without a batch
};

/// Batches in the sampler's order, read ahead in a thread so that reading hides behind compute. An
/// error in the thread is thrown by the next() that would have returned its batch. One caller
/// thread. The end does not wait for a read that next() has given up: its thread is left behind.
class DataLoader {
 public:
  DataLoader(std::shared_ptr<const SampleDataset> dataset, std::unique_ptr<DataSampler> sampler,
             const BatchOptions& batch, const DataLoaderOptions& options = {});
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// Throws when the sampler has come to its end.
  Batch next();

  /// Seconds that next() has waited for data since the last call of this function.
  double take_wait_seconds();

 private:
  struct Reader;

  std::shared_ptr<Reader> reader_;  // the thread's, too
  std::thread thread_;
  double timeout_seconds_;
  double wait_seconds_ = 0;
  bool has_given_up_ = false;
};

}  // namespace megashard
