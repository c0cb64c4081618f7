#include "tests/differential/tree_spec.h"

#include <random>

namespace megashard::testing {
namespace {

class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 engine_;  // the same numbers everywhere
};

class Generator {
 public:
  Generator(uint64_t seed, bool portable) : dice_(seed), portable_(portable) { spec_.seed = seed; }

  TreeSpec run() {
    spec_.world = dice_.of({1, 2, 2, 3, 4, 4});
    if (spec_.world == 4 && dice_.one_in(2)) spec_.replicas = 2;
    if (spec_.world == 2 && dice_.one_in(6)) spec_.replicas = 2;  // a shard group of one
    spec_.width = dice_.of<int64_t>({1, 2, 3, 5, 7, 8, 12});
    if (dice_.one_in(40)) spec_.width = 512;  // weights that travel without the packed buffer
    spec_.microbatches = dice_.of({1, 1, 2, 3});
    spec_.accumulation = dice_.of({Accumulation::kAlwaysSync, Accumulation::kSyncLast, Accumulation::kAllReduceLast});
    spec_.mixed = dice_.one_in(3);
    spec_.input_requires_grad = dice_.one_in(2);
    spec_.thaws = dice_.one_in(3);
    spec_.reductions_in_flight = portable_ ? 1 : dice_.of({1, 1, 2, 3});
    spec_.root = node(/*depth=*/0);
    spec_.root.unit = true;
    join_siblings(spec_.root);
    count_units(spec_.root);
    draw_prefetch(spec_.root);
    if (!spec_.exact()) spec_.steps = 1;  // a second step would amplify what the first rounds
    spec_.offload = !portable_ && dice_.one_in(4);
    return spec_;
  }

 private:
  LayerSpec layer(bool first) {
    using Kind = LayerSpec::Kind;
    LayerSpec made;
    made.kind = dice_.of({Kind::kLinear, Kind::kMlp, Kind::kScale, Kind::kRow});
    if (made.kind == Kind::kMlp) made.hidden = dice_.of<int64_t>({1, 3, 4, 11, 16});
    made.bias = made.kind == Kind::kLinear && dice_.one_in(2);
    made.frozen = dice_.one_in(6);
    if (!first && made.kind == Kind::kLinear) made.tied = dice_.one_in(3);
    if (!portable_ && !first && dice_.one_in(6)) made.skipped_on_rank = static_cast<int>(dice_.below(spec_.world));
    // Every rank must run backward, also one that skips all that trains.
    if (made.skipped_on_rank >= 0) spec_.input_requires_grad = true;
    return made;
  }

  NodeSpec node(int depth) {
    NodeSpec made;
    const int64_t layers = depth == 0 ? dice_.below(2) : 1 + dice_.below(3);
    for (int64_t i = 0; i < layers; ++i) made.layers.push_back(layer(i == 0));
    // Tied to a first layer that has a weight of the same sizes.
    for (auto& each : made.layers) each.tied = each.tied && made.layers[0].kind == LayerSpec::Kind::kLinear;
    const int64_t children = depth == 0 ? 1 + dice_.below(4) : depth == 1 ? dice_.below(3) / 2 * 2 : 0;
    for (int64_t i = 0; i < children; ++i) made.children.push_back(node(depth + 1));
    made.unit = !dice_.one_in(4);
    made.half = spec_.mixed && made.unit && dice_.one_in(2);
    made.reduces_half = made.half && dice_.one_in(3);
    if (depth > 0 && !spec_.mixed && dice_.one_in(6)) made.calls = 2;
    const int shards = spec_.world / spec_.replicas;
    made.reshard = dice_.of({-1, 0, 1, 1, shards == 4 ? 2 : 1});
    made.shard_dim = dice_.one_in(3) ? 1 : 0;
    // PyTorch 2.11 takes the wrong sizes for slices of dimension 1.
    if (portable_ && made.reshard > 1) made.shard_dim = 0;
    made.force_sum = !portable_ && dice_.one_in(6);
    made.unshard_before = made.unit && dice_.one_in(6);
    made.keeps_after_backward = dice_.one_in(6);
    if (!portable_ && depth > 0) made.recompute = dice_.of({0, 0, 0, 1, 2});
    return made;
  }

  /// Two siblings that are units and alike in what a group has once become one list group.
  void join_siblings(NodeSpec& parent) {
    auto& children = parent.children;
    for (size_t i = 0; i + 1 < children.size(); ++i) {
      auto &one = children[i], &next = children[i + 1];
      join_siblings(one);
      const bool taken = i > 0 && children[i - 1].joined;
      if (taken || !one.unit || !next.unit || one.calls > 1 || next.calls > 1 || !dice_.one_in(4)) continue;
      if (one.recompute != 0 || next.recompute != 0) continue;
      one.joined = true;
      next.half = one.half;
      next.reduces_half = one.reduces_half;
    }
    if (!children.empty()) join_siblings(children.back());
  }

  void count_units(const NodeSpec& at) {
    units_ += at.unit ? 1 : 0;
    for (const auto& child : at.children) count_units(child);
  }

  void draw_prefetch(NodeSpec& at) {
    if (at.unit && dice_.one_in(4)) at.forward_prefetch = some_units();
    if (at.unit && dice_.one_in(4)) at.backward_prefetch = some_units();
    for (auto& child : at.children) draw_prefetch(child);
  }

  std::vector<int> some_units() {  // right or wrong: it must not matter
    std::vector<int> some;
    for (int64_t i = 1 + dice_.below(2); i > 0; --i) some.push_back(static_cast<int>(dice_.below(units_)));
    return some;
  }

  Dice dice_;
  bool portable_;
  TreeSpec spec_;
  int64_t units_ = 0;
};

bool runs_twice(const NodeSpec& node) {
  if (node.calls > 1) return true;
  for (const auto& child : node.children) {
    if (runs_twice(child)) return true;
  }
  return false;
}

nlohmann::json to_json(const NodeSpec& node) {
  nlohmann::json layers = nlohmann::json::array(), children = nlohmann::json::array();
  for (const auto& layer : node.layers) {
    layers.push_back({{"kind", static_cast<int>(layer.kind)},
                      {"hidden", layer.hidden},
                      {"bias", layer.bias},
                      {"frozen", layer.frozen},
                      {"tied", layer.tied}});
  }
  for (const auto& child : node.children) children.push_back(to_json(child));
  return {{"layers", layers},
          {"children", children},
          {"calls", node.calls},
          {"unit", node.unit},
          {"joined", node.joined},
          {"reshard", node.reshard},
          {"shard_dim", node.shard_dim},
          {"half", node.half},
          {"reduces_half", node.reduces_half},
          {"unshard_before", node.unshard_before},
          {"keeps_after_backward", node.keeps_after_backward},
          {"forward_prefetch", node.forward_prefetch},
          {"backward_prefetch", node.backward_prefetch}};
}

}  // namespace

bool TreeSpec::exact() const { return !runs_twice(root); }

TreeSpec random_tree(uint64_t seed, bool portable) { return Generator(seed, portable).run(); }

nlohmann::json to_json(const TreeSpec& spec) {
  return {{"seed", spec.seed},
          {"world", spec.world},
          {"replicas", spec.replicas},
          {"width", spec.width},
          {"steps", spec.steps},
          {"microbatches", spec.microbatches},
          {"accumulation", static_cast<int>(spec.accumulation)},
          {"mixed", spec.mixed},
          {"input_requires_grad", spec.input_requires_grad},
          {"thaws", spec.thaws},
          {"root", to_json(spec.root)}};
}

}  // namespace megashard::testing
