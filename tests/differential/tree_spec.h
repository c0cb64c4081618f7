#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

namespace megashard::testing {

/// One layer of a random model: x -> x' of the same width.
struct LayerSpec {
  enum class Kind { kLinear, kMlp, kScale, kRow };
  Kind kind = Kind::kLinear;
  int64_t hidden = 0;        ///< kMlp
  bool bias = false;         ///< kLinear
  bool frozen = false;       ///< all its parameters
  int skipped_on_rank = -1;  ///< this rank does not use it
  bool tied = false;         ///< kLinear: its weight is the first layer's of the same node
};

/// A module: its layers, then its children. Units are the arguments of fully_shard.
struct NodeSpec {
  std::vector<LayerSpec> layers;
  std::vector<NodeSpec> children;
  int calls = 1;  ///< by its parent, one after the other
  bool unit = false;
  bool joined = false;  ///< to the next sibling: one list group with it
  int reshard = -1;     ///< -1: unset, 0: never, 1: always, k > 1: to k ranks
  int shard_dim = 0;    ///< of parameters that have it and divide by the ranks; others: 0
  bool half = false;    ///< computes in bf16
  bool reduces_half = false;
  bool force_sum = false;
  bool unshard_before = false;  ///< by hand, before forward
  bool keeps_after_backward = false;
  int recompute = 0;                   ///< 1: non-reentrant, 2: reentrant
  std::vector<int> forward_prefetch;   ///< units by their number in pre-order
  std::vector<int> backward_prefetch;  ///< the same; empty: the default
};

enum class Accumulation { kAlwaysSync, kSyncLast, kAllReduceLast };

struct TreeSpec {
  uint64_t seed = 0;
  int world = 1;
  int replicas = 1;
  int64_t width = 1;
  int steps = 2;
  int microbatches = 1;
  Accumulation accumulation = Accumulation::kAlwaysSync;
  bool mixed = false;  ///< some unit computes in bf16: then every unit says its dtype
  bool input_requires_grad = false;
  bool thaws = false;  ///< frozen layers train from the second step on
  int reductions_in_flight = 1;
  bool offload = false;  ///< CpuOffloadPolicy, which is nothing on a CPU
  NodeSpec root;

  /// Every result is bit-equal to the unsharded one: false where gradients of one step are added in
  /// another order (a unit that runs twice).
  bool exact() const;
};

/// A tree that depends on the seed alone. `portable`: only what PyTorch's FSDP2 has too.
TreeSpec random_tree(uint64_t seed, bool portable = false);

nlohmann::json to_json(const TreeSpec& spec);

}  // namespace megashard::testing
