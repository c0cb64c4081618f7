#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "framework/diagnostics.h"

namespace megashard {

struct Arguments;
struct Option;
struct RunParts;
class Mistakes;

/// Context parallelism: how ranks share each sequence. (derived): computed by validate_arguments.
struct ContextParallelArguments {
  int64_t context_parallel_size = 1;
  std::optional<std::string> context_parallel_algo;          // MindSpeed's; (derived) from cp_comm_type, else Ulysses
  std::vector<std::string> cp_comm_type;                     // Megatron's equivalent
  std::optional<int64_t> ulysses_degree_in_cp;               // (derived) ranks that share the heads of a sequence
  std::vector<int64_t> hierarchical_context_parallel_sizes;  // Megatron's equivalent, with the ring size

  /// Number of ring ranks between which keys and values are passed; 1: no ring.
  int64_t ring_size() const { return context_parallel_size / ulysses_degree_in_cp.value_or(context_parallel_size); }
  /// Sequence lengths must be a multiple of this number of tokens.
  int64_t sequence_multiple() const { return ring_size() == 1 ? 1 : 2 * context_parallel_size; }
};

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_context_parallel_options(std::vector<Option>& rows);
void validate_context_parallel(Arguments& arguments, const RunParts& parts, const DiagnosticSink& sink,
                               Mistakes& rules);

}  // namespace detail

}  // namespace megashard
