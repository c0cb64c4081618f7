#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "framework/batch.h"
#include "framework/modules/weight_init_mixin.h"
#include "models/config/decoder_config.h"
#include "models/layers/part.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// The experts of each token and their weights.
struct Routing {
  at::Tensor weights;         ///< [N, K], of the hidden states' dtype or fp32
  at::Tensor experts;         ///< [N, K] int64
  at::Tensor balance{}, z{};  ///< as in LayerOutput, of this layer

  template <class F>
  void visit_tensors(F&& f) {
    f(weights);
    f(experts);
    f(balance);
    f(z);
  }
};

/// The router of a layer with experts.
class Router {
 public:
  virtual ~Router() = default;
  /// tokens [N, C] of `sequences` sequences of equal length; `mask` [N] bool: tokens that count for the router losses;
  /// undefined: all.
  virtual Routing route(const at::Tensor& tokens, const at::Tensor& mask, int64_t sequences) = 0;
  virtual std::shared_ptr<torch::nn::Module> module() = 0;
};

/// Hooked<M> as a Router; M::forward has the signature of route().
template <class M>
class RouterOf final : public Hooked<M>, public Router {
 public:
  using Hooked<M>::Hooked;
  Routing route(const at::Tensor& tokens, const at::Tensor& mask, int64_t sequences) override {
    return this->forward(tokens, mask, sequences);
  }
  std::shared_ptr<torch::nn::Module> module() override { return this->shared_from_this(); }
};

/// Description of a router, without ranks and flags. An open set: one file per kind.
class RouterSpec {
 public:
  virtual ~RouterSpec() = default;
  virtual std::shared_ptr<Router> build(int64_t hidden_size, const MoeConfig& config) const = 0;
  /// Of its module in the block.
  virtual std::string name() const { return "gate"; }
  /// Parameters and buffers of the router that stay in fp32.
  virtual std::vector<std::string> names_in_fp32() const { return {}; }
};

using RouterSpecPtr = std::shared_ptr<const RouterSpec>;

/// Scores in fp32, then the K largest (transformers' Qwen3MoeTopKRouter, DeepseekV3TopkRouter and others). Weights have
/// the tokens' dtype, with in_fp32 fp32.
RouterSpecPtr top_k_router(std::string class_name, RouterConfig config);

/// Statistics for the router losses that `config` asks for, as Routing's balance and z; undefined without losses.
/// logits [N, experts]; probabilities [N, experts] fp32 and experts [N, K] of the router; mask as route()'s.
struct RouterStatistics {
  at::Tensor balance, z;
};
RouterStatistics router_statistics(const MoeConfig& config, bool trains, const at::Tensor& logits,
                                   const at::Tensor& probabilities, const at::Tensor& experts, const at::Tensor& mask,
                                   int64_t sequences);

/// transformers' load_balancing_loss_func over all layers together, a scalar: experts_per_token if all experts are used
/// equally, 0 without tokens. `balance`: LayerOutput's [layers, 2, B, experts], summed over the ranks that share the
/// sequences.
at::Tensor load_balancing_loss(const at::Tensor& balance, int64_t experts_per_token);

/// The router losses that `config` asks for: transformers' above, and Megatron's for each layer separately
/// (moe_utils.py: switch_load_balancing_loss_func, z_loss_func), whose metrics are means over the layers. `states`:
/// summed over the ranks that share the sequences.
std::vector<AuxTerm> router_losses(const LayerOutput& states, const MoeConfig& config);

}  // namespace megashard
