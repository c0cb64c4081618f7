#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "framework/diagnostics.h"

namespace megashard {

struct Arguments;
struct Option;
class Mistakes;

/// How ranks share each sequence. (derived): filled by validate_arguments.
struct ContextParallelArguments {
  int64_t context_parallel_size = 1;
  std::optional<std::string> context_parallel_algo;  // MindSpeed's; (derived) what cp_comm_type says, else Ulysses
  std::vector<std::string> cp_comm_type;             // Megatron's, which says the same
  std::optional<int64_t> ulysses_degree_in_cp;       // (derived) ranks of a sequence that share its heads
  std::vector<int64_t> hierarchical_context_parallel_sizes;  // Megatron's: the same, and the places of the ring

  /// Places of the ring in which a sequence's keys travel; 1: they do not.
  int64_t ring_size() const { return context_parallel_size / ulysses_degree_in_cp.value_or(context_parallel_size); }
  /// Sequences are a multiple of so many tokens long.
  int64_t sequence_multiple() const { return ring_size() == 1 ? 1 : 2 * context_parallel_size; }
};

namespace detail {

/// The rows of these options, in the order of the help.
void add_context_parallel_options(std::vector<Option>& rows);
void validate_context_parallel(Arguments& arguments, const DiagnosticSink& sink, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
