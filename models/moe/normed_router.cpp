#include "models/moe/normed_router.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>

#include <cmath>
#include <utility>

#include "models/layers/linear.h"

namespace megashard {
namespace {

class NormedRouter : public torch::nn::Module, public SelfInitializing {
 public:
  NormedRouter(std::string class_name, const NormSpec& norm, const MoeConfig& config)
      : class_name_(std::move(class_name)), config_(config) {
    norm_ = register_module("norm", std::make_shared<Hooked<Norm>>(norm));
    const Linear::Options options{.in = norm.width, .out = config.num_experts};
    proj_ = register_module("proj", std::make_shared<Hooked<Linear>>(options));
    scale_ = register_parameter("scale", at::ones({norm.width}));
    per_expert_scale_ = register_parameter("per_expert_scale", at::ones({config.num_experts}));
  }

  Routing forward(const at::Tensor& tokens, const at::Tensor& mask, int64_t sequences) {
    const double factor = 1 / std::sqrt(static_cast<double>(tokens.size(1)));
    const auto logits = proj_->forward(norm_->forward(tokens) * scale_ * factor);
    const auto scores = at::softmax(logits, -1, at::kFloat);
    auto [weights, experts] = at::topk(scores, config_.experts_per_token, -1);
    weights = weights / weights.sum(-1, /*keepdim=*/true) * per_expert_scale_.index({experts});
    auto losses = router_statistics(config_, is_training(), logits, scores, experts, mask, sequences);
    return {std::move(weights), std::move(experts), std::move(losses.balance), std::move(losses.z)};
  }
  void init_own_weights(const WeightInit& /*init*/) override {
    scale_.fill_(1);
    per_expert_scale_.fill_(1);
  }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  MoeConfig config_;
  std::shared_ptr<Hooked<Norm>> norm_;
  std::shared_ptr<Hooked<Linear>> proj_;
  at::Tensor scale_;             // [C]
  at::Tensor per_expert_scale_;  // [experts]
};

class NormedRouterSpec final : public RouterSpec {
 public:
  NormedRouterSpec(std::string class_name, NormSpec norm)
      : class_name_(std::move(class_name)), norm_(std::move(norm)) {}
  std::shared_ptr<Router> build(int64_t /*hidden_size*/, const MoeConfig& config) const override {
    return std::make_shared<RouterOf<NormedRouter>>(class_name_, norm_, config);
  }
  std::string name() const override { return "router"; }

 private:
  std::string class_name_;
  NormSpec norm_;
};

}  // namespace

RouterSpecPtr normed_router(std::string class_name, NormSpec norm) {
  return std::make_shared<NormedRouterSpec>(std::move(class_name), std::move(norm));
}

}  // namespace megashard
