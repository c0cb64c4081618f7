#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// A group of parameters that is gathered and reduced as one, for people to read; it has run once.
struct UnitSummary {
  std::string module{};          ///< path under the root; of a list its first; empty: the root
  int64_t parameters = 0;      ///< elements of the whole
  int64_t sharded_bytes = 0;   ///< of a rank's rows as stored, with padding
  int64_t gathered_bytes = 0;  ///< of the whole, as it is computed with
  int ranks = 1;               ///< that share the rows
  at::ScalarType stored = at::kFloat, computed_in = at::kFloat;  ///< of the first parameter
  std::vector<std::string> forward_prefetch{}, backward_prefetch{};  ///< modules that it gathers ahead
};

/// The units under a root, in the order of its modules.
std::vector<UnitSummary> unit_summaries(const torch::nn::Module& root);

}  // namespace megashard
