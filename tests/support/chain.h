#pragma once

#include <string>
#include <vector>

#include "tests/support/formula.h"

namespace megashard::testing {

using Events = std::vector<std::string>;

/// Units a, b, c, ... with one weight each, then a root with its own weight. The units are children of the root.
struct Chain {
  explicit Chain(int depth = 3, int64_t width = 6) : width(width), root({{width, width}}, linear) {
    for (int i = 0; i < depth; ++i) {
      units.push_back(
          std::make_shared<Formula>(Sizes{{width, width}}, linear, at::kFloat, static_cast<uint64_t>(10 * (i + 1))));
      root.register_module(std::string(1, static_cast<char>('a' + i)), units.back());
    }
    root.body = [this](const Weights& w, at::Tensor x) {
      for (auto& unit : units) x = unit->forward(x);
      return at::linear(x, w[0]);
    };
  }
  Chain(const Chain&) = delete;  // the body refers to this

  void shard(const FullyShardOptions& options) {
    for (auto& unit : units) fully_shard(*unit, options);
    fully_shard(root, options);
    watch();
  }
  void watch() {
    set_schedule_observer(
        root, [this](const char* event, const std::string& group) { events.push_back(event + (" " + group)); });
  }
  at::Tensor forward(uint64_t seed = 1) {
    events.clear();
    return root.forward(fixed({4, width}, seed).requires_grad_()).sum();
  }
  void backward(const at::Tensor& loss) {
    events.clear();
    loss.backward();
  }
  /// Gathers and ends of backward since the last forward or backward: they show when parameters are unsharded. The root
  /// is called Formula.
  Events gathers_and_post_backwards() const {
    Events kept;
    for (const auto& event : events) {
      if (event.starts_with("unshard") || event.starts_with("post_backward")) kept.push_back(event);
    }
    return kept;
  }

  int64_t width;
  Formula root;
  std::vector<std::shared_ptr<Formula>> units;
  Events events;
};

inline Events gathers(std::initializer_list<const char*> names) {
  Events events;
  for (const char* name : names) events.push_back(std::string("unshard ") + name);
  return events;
}

}  // namespace megashard::testing
