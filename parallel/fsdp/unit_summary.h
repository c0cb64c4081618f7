#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// Printable summary of one parameter group; fill it after the group has run once.
struct UnitSummary {
  std::string module{};          ///< path under the root (of a list: the first); empty: the root
  int64_t parameters = 0;      ///< number of elements, unsharded
  int64_t sharded_bytes = 0;   ///< a rank's rows as stored, padded
  int64_t gathered_bytes = 0;  ///< unsharded, in the compute dtype
  int ranks = 1;               ///< ranks that share the rows
  at::ScalarType stored = at::kFloat, computed_in = at::kFloat;  ///< of the first parameter
  std::vector<std::string> forward_prefetch{}, backward_prefetch{};  ///< modules that it prefetches
};

/// Summaries of the units under a root, in module order.
std::vector<UnitSummary> unit_summaries(const torch::nn::Module& root);

}  // namespace megashard
