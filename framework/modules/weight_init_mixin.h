#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>

#include <optional>
#include <unordered_set>

namespace megashard {

struct WeightInit {
  double std = 0.02;
  /// Unset: the default generator, which the threads of a process share.
  std::optional<at::Generator> generator{};
};

/// A module that knows how its own parameters start (scaled output projections, padding rows). In
/// place only.
class SelfInitializing {
 public:
  virtual ~SelfInitializing() = default;
  virtual void init_own_weights(const WeightInit& init) = 0;
};

/// The initialisation of a model trained from scratch (mindspeed_mm's WeightInitMixin). It changes
/// parameters in place by ATen operators under NoGradGuard, so that it runs after construction as
/// well as inside a deferred construction, which records it and replays it shard by shard.
class WeightInitMixin {
 public:
  virtual ~WeightInitMixin() = default;

  /// Initialises all modules that were not yet, children before their parent. The mixing class must
  /// be a module.
  void init_weights();
  /// Modules that init_weights() shall leave as they are (loaded from elsewhere).
  void mark_initialized(const torch::nn::Module& module) { initialized_.insert(&module); }
  bool is_initialized(const torch::nn::Module& module) const { return initialized_.contains(&module); }

  /// What init_weights() uses: a model sets the std of its configuration, a program
  /// --init-method-std.
  WeightInit& weight_init() { return weight_init_; }

 protected:
  /// One module's own parameters, not its children's. Linear and convolution: weight N(0, std),
  /// bias 0. Embedding without padding index: N(0, std); with one: left. MultiheadAttention: its
  /// own reset. Class name containing "norm": weight 1, bias 0. SelfInitializing: its own. Others,
  /// by parameter name: weight N(0, std), bias 0, else N(0, std).
  virtual void _init_weights(torch::nn::Module& module, double std);

 private:
  void visit(torch::nn::Module& module, std::unordered_set<const void*>& done);

  WeightInit weight_init_;
  std::unordered_set<const torch::nn::Module*> initialized_;
};

}  // namespace megashard
