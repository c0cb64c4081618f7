#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <unordered_set>

namespace megashard {

struct WeightInit {
  double std = 0.02;
  /// Unset: the default generator, shared by all threads of the process.
  std::optional<at::Generator> generator{};
};

/// A module that initialises its own parameters (scaled output projections, padding rows), in place.
class SelfInitializing {
 public:
  virtual ~SelfInitializing() = default;
  virtual void init_own_weights(const WeightInit& init) = 0;
};

/// Weight initialisation for training from scratch (mindspeed_mm's WeightInitMixin). Changes parameters in place with
/// ATen operators under NoGradGuard, so it works after construction and inside a deferred construction, which records
/// it and replays it shard by shard.
class WeightInitMixin {
 public:
  virtual ~WeightInitMixin() = default;

  /// Initialises all modules that are not initialised yet, children before their parent. The derived class must be a
  /// module.
  void init_weights();
  /// Makes init_weights() skip a module (weights loaded from elsewhere).
  void mark_initialized(const torch::nn::Module& module) { initialized_.insert(&module); }
  bool is_initialized(const torch::nn::Module& module) const { return initialized_.contains(&module); }

  /// Settings of init_weights(): a model sets the std of its configuration, a program --init-method-std.
  WeightInit& weight_init() { return weight_init_; }

 protected:
  /// Initialises a module's own parameters, not its children's. Linear and convolution: weight N(0, std), bias 0.
  /// Embedding: N(0, std), unchanged if it has a padding index. MultiheadAttention: its own reset. Class name
  /// containing "norm": weight 1, bias 0. SelfInitializing: its own function. Others, by parameter name: weight N(0,
  /// std), bias 0, else N(0, std).
  virtual void _init_weights(torch::nn::Module& module, double std);

 private:
  void visit(torch::nn::Module& module, std::unordered_set<const void*>& done);

  WeightInit weight_init_;
  std::unordered_set<const torch::nn::Module*> initialized_;
};

/// Replaces a parameter of `module` by the tensor `shared`, both the member and the registration:
///   tie_parameter(*head, head->weight, embedding->weight);
/// (`head->weight = embedding->weight` alone leaves the old tensor registered: it would be trained, saved, and unused.)
/// Sizes must be equal. Call it in the model's constructor, before fully_shard and before an optimizer is created. It
/// is not named `tie`, because argument-dependent lookup would find std::tie, which accepts anything and does nothing.
void tie_parameter(torch::nn::Module& module, at::Tensor& member, const at::Tensor& shared);

}  // namespace megashard
