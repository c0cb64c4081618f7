#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace megashard {

enum class SamplerType {
  kSingle,  ///< once through the dataset, in order; a last, incomplete microbatch is left out
  kCyclic,  ///< endless; each epoch a new permutation of each rank's range, seeded with its number
};

struct SamplerOptions {
  SamplerType type = SamplerType::kSingle;
  int64_t total_samples = 0;
  /// Over all ranks, since the start of training: where a resumed run goes on.
  int64_t consumed_samples = 0;
  int64_t micro_batch_size = 1;
  int64_t data_parallel_rank = 0;
  int64_t data_parallel_size = 1;
};

/// Which samples this rank takes, microbatch by microbatch, in the order of Megatron's
/// MegatronPretrainingSampler (kSingle) and MegatronPretrainingRandomSampler (kCyclic).
class DataSampler {
 public:
  virtual ~DataSampler() = default;

  /// Sets `indices` to the next microbatch; false when kSingle has come to its end.
  virtual bool next(std::vector<int64_t>& indices) = 0;
};

std::unique_ptr<DataSampler> make_data_sampler(const SamplerOptions& options);

}  // namespace megashard
