#pragma once

#include <cstdint>
#include <memory>
#include <vector>

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

}  // namespace megashard
