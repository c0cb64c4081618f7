#include "framework/arguments/context_parallel_arguments.h"

#include <c10/util/StringUtil.h>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_validation.h"
#include "framework/arguments/option_group.h"
#include "framework/mistakes.h"

namespace megashard::detail {
namespace {

using A = Arguments;
using std::to_string;

constexpr const char* kUlysses = "ulysses_cp_algo";
constexpr const char* kRing = "megatron_cp_algo";
constexpr const char* kHybrid = "hybrid_cp_algo";
constexpr const char* kGatheredKeys = "kvallgather_cp_algo";  // numerically equal to the ring

/// MindSpeed's name of Megatron's setting. all_gather is numerically equal to a ring.
const char* algorithm_of(const std::string& comm_type) {
  if (comm_type == "a2a") return kUlysses;
  return comm_type == "a2a+p2p" ? kHybrid : kRing;
}

/// Sets one algorithm for all layers, by MindSpeed's name. Returns false after a mistake.
bool derive_algorithm(Arguments& arguments, const DiagnosticSink& sink, Mistakes& rules) {
  const auto& types = arguments.cp_comm_type;
  auto& algorithm = arguments.context_parallel_algo;
  const std::string given = "--cp-comm-type " + c10::Join(" ", types);
  bool gathers = algorithm == kGatheredKeys;
  if (gathers) algorithm = kRing;
  for (const auto& type : types) gathers = gathers || type == "all_gather" || type == "allgather";
  for (const auto& type : types) {
    const bool is_one = algorithm_of(type) == std::string(algorithm_of(types.front()));
    if (!rules.require(is_one, given + " differs between layers, which all share a sequence in one way here; give one "
                                       "type."))
      return false;
  }
  if (!rules.require(types.empty() || !algorithm || *algorithm == algorithm_of(types.front()),
                     "--context-parallel-algo " + algorithm.value_or("") + " and " + given +
                         " are different ways to share a sequence; give one of them."))
    return false;
  if (!algorithm) algorithm = types.empty() ? kUlysses : algorithm_of(types.front());
  if (gathers) {
    sink(Severity::kNotice,
         (types.empty() ? std::string("--context-parallel-algo ") + kGatheredKeys : given) + " is done as " + kRing +
             ": keys and values are not gathered but travel in a ring beside the compute; the numbers are the same.");
  }
  return true;
}

/// Sets the number of a sequence's ranks that share its heads; the others form a ring. Returns false after a mistake.
bool derive_sharing_of_heads(Arguments& arguments, Mistakes& rules) {
  const int64_t ranks = arguments.context_parallel_size;
  auto& sharing = arguments.ulysses_degree_in_cp;
  const auto& sizes = arguments.hierarchical_context_parallel_sizes;
  const std::string of_sizes = "--hierarchical-context-parallel-sizes " + c10::Join(" ", sizes);
  if (arguments.context_parallel_algo != kHybrid) {
    const bool given = arguments.is_given("ulysses_degree_in_cp");
    if (!rules.require(!given && sizes.empty(),
                       (given ? "--ulysses-degree-in-cp" : of_sizes) +
                           " is for a ring whose ranks share heads as well; add --context-parallel-algo hybrid_cp_algo "
                           "(Megatron: --cp-comm-type a2a+p2p), or leave it out."))
      return false;
    sharing = arguments.context_parallel_algo == kRing ? 1 : ranks;
    return true;
  }
  if (!sizes.empty()) {
    const bool fits = sizes.size() == 2 && sizes[0] > 0 && sizes[0] * sizes[1] == ranks;
    if (!rules.require(fits, of_sizes +
                                 " must be two numbers, the ranks that share heads and the places of the ring, "
                                 "whose product is --context-parallel-size " +
                                 to_string(ranks) + "."))
      return false;
    if (!rules.require(!sharing || *sharing == sizes[0], "--ulysses-degree-in-cp " + to_string(sharing.value_or(0)) +
                                                             " and " + of_sizes + " differ; give one of them."))
      return false;
    sharing = sizes[0];
  }
  if (!rules.require(sharing.has_value(), "hybrid_cp_algo (a2a+p2p) needs --ulysses-degree-in-cp, the ranks that share "
                                          "heads, or --hierarchical-context-parallel-sizes."))
    return false;
  return rules.require(*sharing > 0 && ranks % *sharing == 0 && *sharing < ranks,
                       "--ulysses-degree-in-cp " + to_string(*sharing) + " must divide --context-parallel-size " +
                           to_string(ranks) +
                           " and leave a ring of two places at least; without a ring give ulysses_cp_algo (a2a).");
}

}  // namespace

void add_context_parallel_options(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("distributed", rows);
  group.add("--context-parallel-size", &A::context_parallel_size, kFree, "ranks that share each sequence").above(0);
  group
      .add("--context-parallel-algo", &A::context_parallel_algo, kFree,
           "how: each rank has some attention heads (ulysses), keys and values travel in a ring (megatron), or both "
           "(hybrid); unset: ulysses_cp_algo")
      .one_of({kUlysses, kRing, kHybrid, kGatheredKeys})
      .refuse_values({"adaptive_cp_algo", "hybrid_adaptive_cp_algo"},
                     "the way of the keys does not follow the mask here; use megatron_cp_algo or hybrid_cp_algo");
  group
      .add("--cp-comm-type", &A::cp_comm_type, kFree,
           "Megatron's way to say it: a2a, p2p or a2a+p2p; all_gather is done as p2p")
      .one_of({"p2p", "a2a", "a2a+p2p", "all_gather", "allgather"});
  group.add("--ulysses-degree-in-cp", &A::ulysses_degree_in_cp, kFree, "of hybrid_cp_algo: ranks that share heads")
      .above(0);
  group.add("--hierarchical-context-parallel-sizes", &A::hierarchical_context_parallel_sizes, kFree,
            "Megatron's way to say it: ranks that share heads, and places of the ring");
}

void validate_context_parallel(Arguments& arguments, const RunParts& parts, const DiagnosticSink& sink,
                               Mistakes& rules) {
  if (arguments.context_parallel_size <= 1) {  // the settings have no effect with one rank
    arguments.ulysses_degree_in_cp.reset();
    return;
  }
  if (!derive_algorithm(arguments, sink, rules) || !derive_sharing_of_heads(arguments, rules)) return;
  if (!parts.training || arguments.skip_train) return;  // infer pads texts
  const int64_t length = arguments.seq_length.value_or(0), multiple = arguments.sequence_multiple();
  rules.require(length % multiple == 0,
                "--seq-length " + to_string(length) + " is not divisible by " + to_string(multiple) +
                    ", twice --context-parallel-size, into which a ring cuts a sequence; change one of them.");
}

}  // namespace megashard::detail
