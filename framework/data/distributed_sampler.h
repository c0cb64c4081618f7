#pragma once

#include <cstdint>
#include <vector>

namespace megashard {

struct DistributedSamplerOptions {
  int64_t total_samples = 0;
  int64_t replicas = 1;
  int64_t rank = 0;  ///< of `replicas`
  bool shuffle = true;
  int64_t seed = 0;  ///< the same on all ranks; the epoch is added to it
  /// Samples that do not divide by the replicas: left out, or filled up with the first ones.
  bool drop_last = false;
};

/// This rank's samples of one epoch, in the order of torch.utils.data.DistributedSampler after
/// set_epoch(epoch): each rank takes every replicas-th of one permutation, and all ranks equally
/// many. Throws for a rank outside the replicas.
std::vector<int64_t> distributed_samples(const DistributedSamplerOptions& options, int64_t epoch);

}  // namespace megashard
