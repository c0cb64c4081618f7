#include "models/layers/layer_inputs.h"

#include <ATen/TensorOperators.h>

#include <cmath>
#include <utility>

#include "framework/mistakes.h"
#include "models/layers/mlp.h"

namespace megashard {

LayerInputs::LayerInputs(torch::nn::Module& stack, const DecoderConfig& config, NormSpec of_inputs)
    : size(config.layer_inputs.size) {
  const int64_t width = config.num_layers * size;
  embedding = stack.register_module(
      "embed_tokens_per_layer",
      std::make_shared<Hooked<Embedding>>(config.layer_inputs.vocab_size, width, config.pad_token_id));
  const Linear::Options options{.in = config.hidden_size, .out = width};
  projection = stack.register_module("per_layer_model_projection", std::make_shared<Hooked<Linear>>(options));
  norm = stack.register_module("per_layer_projection_norm", std::make_shared<Hooked<Norm>>(std::move(of_inputs)));
}

at::Tensor LayerInputs::forward(const at::Tensor& tokens, const at::Tensor& embedded) {
  const auto by_layer = [&](const at::Tensor& x) { return x.unflatten(2, {-1, size}); };
  const double scale = 1 / std::sqrt(static_cast<double>(embedded.size(2)));
  const auto context = norm->forward(by_layer(projection->forward(embedded) * scale));
  const auto own = embedding->forward(tokens);
  return (context + by_layer(own * rounded(std::sqrt(static_cast<double>(size)), own.scalar_type()))) * std::sqrt(0.5);
}

namespace {

class LayerInput : public torch::nn::Module {
 public:
  explicit LayerInput(LayerInputSpec spec) : spec_(std::move(spec)) {
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, std::make_shared<Hooked<Linear>>(Linear::Options{.in = in, .out = out}));
    };
    gate_ = linear("per_layer_input_gate", spec_.hidden_size, spec_.size);
    projection_ = linear("per_layer_projection", spec_.size, spec_.hidden_size);
  }

  at::Tensor forward(const at::Tensor& hidden, const Pass& pass) {
    const auto input = pass.layer_inputs.select(2, spec_.layer);
    return projection_->forward(activate(gate_->forward(hidden), spec_.activation) * input);
  }
  std::string class_name() const { return spec_.class_name; }

 private:
  LayerInputSpec spec_;
  std::shared_ptr<Hooked<Linear>> gate_, projection_;
};

class LayerInputPart final : public PartSpec {
 public:
  explicit LayerInputPart(LayerInputSpec spec) : spec_(std::move(spec)) {}

  std::shared_ptr<Part> build(const BuildContext& /*context*/) const override {
    return std::make_shared<PartOf<LayerInput>>(spec_);
  }
  /// Gate, projection, and the layer's share of LayerInputs' projection.
  double training_flops(int64_t /*sequence_length*/) const override {
    return 18.0 * static_cast<double>(spec_.hidden_size * spec_.size);
  }
  void check_tensor_ranks(const std::string& model) const override {
    require(false, model + " has inputs of each layer, which --tensor-model-parallel-size does not cut; leave it out, "
                           "and FSDP2 shards them over all ranks.");
  }
  bool continues_from_cache() const override { return true; }
  std::string norm_before() const override { return ""; }

 private:
  LayerInputSpec spec_;
};

}  // namespace

PartSpecPtr layer_input_part(LayerInputSpec spec) { return std::make_shared<LayerInputPart>(std::move(spec)); }

}  // namespace megashard
