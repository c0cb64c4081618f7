#pragma once

#include <cstdint>
#include <vector>

namespace megashard {

struct DistributedSamplerOptions {
  int64_t total_samples = 0;
  int64_t replicas = 1;
  int64_t rank = 0;  ///< in [0, replicas)
  bool shuffle = true;
  int64_t seed = 0;  ///< same on all ranks; the epoch is added to it
  /// If the samples do not divide evenly: true drops the last ones, false repeats the first ones.
  bool drop_last = false;
};

/// This rank's samples of one epoch, in the order of torch.utils.data.DistributedSampler after set_epoch(epoch): each
/// rank takes every replicas-th entry of one permutation, and all ranks take equally many. Throws if `rank` is out of
/// range.
std::vector<int64_t> distributed_samples(const DistributedSamplerOptions& options, int64_t epoch);

}  // namespace megashard
