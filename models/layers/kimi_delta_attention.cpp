#include "models/layers/kimi_delta_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>

#include <cmath>
#include <utility>

#include "framework/mistakes.h"
#include "models/kernels/causal_conv.h"
#include "models/kernels/delta_rule.h"
#include "models/layers/channel_conv.h"
#include "models/layers/linear.h"
#include "models/layers/mlp.h"
#include "models/layers/whole_sequence.h"

namespace megashard {
namespace {

class KimiDeltaAttention : public torch::nn::Module, public SelfInitializing {
 public:
  explicit KimiDeltaAttention(const KimiDeltaAttentionSpec& spec) : spec_(spec) {
    const int64_t hidden = spec.hidden_size, latent = spec.head_dim, width = spec.heads * spec.head_dim;
    const auto linear = [&](const char* name, int64_t in, int64_t out, double init_scale = 1) {
      const Linear::Options options{.in = in, .out = out, .init_scale = init_scale};
      return register_module(name, std::make_shared<Hooked<Linear>>(options));
    };
    const auto conv = [&](const char* name) {
      return register_module(name, std::make_shared<Hooked<ChannelConv>>(width, spec.conv_width));
    };
    q_proj_ = linear("q_proj", hidden, width);
    k_proj_ = linear("k_proj", hidden, width);
    v_proj_ = linear("v_proj", hidden, width);
    q_conv_ = conv("q_conv1d");
    k_conv_ = conv("k_conv1d");
    v_conv_ = conv("v_conv1d");
    f_a_proj_ = linear("f_a_proj", hidden, latent);
    f_b_proj_ = linear("f_b_proj", latent, width);
    dt_bias_ = register_parameter("dt_bias", at::empty({width}));
    a_log_ = register_parameter("A_log", at::empty({1, 1, spec.heads, 1}));
    b_proj_ = linear("b_proj", hidden, spec.heads);
    g_a_proj_ = linear("g_a_proj", hidden, latent);
    g_b_proj_ = linear("g_b_proj", latent, width);
    o_norm_ = register_module("o_norm", std::make_shared<Hooked<Norm>>(spec.norm));
    o_proj_ = linear("o_proj", width, hidden, spec.output_init_scale);
  }

  at::Tensor forward(const at::Tensor& own, const Pass& pass) {
    const auto heads = [this](const at::Tensor& x) { return x.unflatten(2, {spec_.heads, -1}); };
    const WholeSequence sequence(pass);
    const auto whole =
        sequence.gather({heads(q_proj_->forward(own)), heads(k_proj_->forward(own)), heads(v_proj_->forward(own)),
                         heads(f_b_proj_->forward(f_a_proj_->forward(own))), b_proj_->forward(own).unsqueeze(-1)});
    const auto gate = heads(g_b_proj_->forward(g_a_proj_->forward(own)));
    const auto mixed = sequence.scatter(mix(whole, sequence).to(own.scalar_type()));
    const auto gated = o_norm_->forward(mixed.to(at::kFloat)) * at::sigmoid(gate.to(at::kFloat));
    return o_proj_->forward(gated.to(own.scalar_type()).flatten(2));
  }

  void init_own_weights(const WeightInit& init) override {
    a_log_.uniform_(1, 16, init.generator).log_();
    // softplus(dt_bias) is a step whose logarithm is drawn evenly.
    const auto step = dt_bias_.uniform_(std::log(1e-3), std::log(1e-1), init.generator).exp_().clamp_min_(1e-4);
    dt_bias_.add_((-step).expm1().neg().log());
  }
  std::string class_name() const { return spec_.class_name; }

 private:
  /// Takes whole sequences of some heads: queries, keys, values, decays [B, T, h, D] and [B, T, h, 1]; returns the
  /// rule's results, fp32.
  at::Tensor mix(const std::vector<at::Tensor>& whole, const WholeSequence& sequence) const {
    const auto begins = sequence.begins(whole[0]);
    const auto of_rank = [&](const at::Tensor& parameter) {
      return sequence.of_rank(parameter.unflatten(0, {spec_.heads, spec_.head_dim}));
    };
    const auto convolved = [&](const at::Tensor& x, const ChannelConv& conv) {
      const auto y = causal_conv(x.flatten(2), of_rank(conv.weight).flatten(0, 1).squeeze(1), begins);
      return activate(y, spec_.activation).to(at::kFloat).unflatten(2, {-1, spec_.head_dim});
    };
    const auto rate = sequence.of_rank(a_log_.view({spec_.heads, 1})).to(at::kFloat).exp();
    const auto steps = at::softplus(whole[3].to(at::kFloat) + of_rank(dt_bias_));
    return gated_delta_rule({.q = convolved(whole[0], *q_conv_),
                             .k = convolved(whole[1], *k_conv_),
                             .v = convolved(whole[2], *v_conv_),
                             .decay = -rate * steps,
                             .beta = at::sigmoid(whole[4].squeeze(-1)).to(at::kFloat),
                             .begins = begins});
  }

  KimiDeltaAttentionSpec spec_;
  std::shared_ptr<Hooked<Linear>> q_proj_, k_proj_, v_proj_, f_a_proj_, f_b_proj_, b_proj_, g_a_proj_, g_b_proj_;
  std::shared_ptr<Hooked<Linear>> o_proj_;
  std::shared_ptr<Hooked<ChannelConv>> q_conv_, k_conv_, v_conv_;
  at::Tensor dt_bias_;  // [H * D]
  at::Tensor a_log_;    // [1, 1, H, 1]
  std::shared_ptr<Hooked<Norm>> o_norm_;
};

class KimiDeltaAttentionPart final : public PartSpec {
 public:
  explicit KimiDeltaAttentionPart(KimiDeltaAttentionSpec spec) : spec_(std::move(spec)) {}

  std::shared_ptr<Part> build(const BuildContext& /*context*/) const override {
    return std::make_shared<PartOf<KimiDeltaAttention>>(spec_);
  }
  /// Counts projections, convolutions, and three products of a state for each token.
  double training_flops(int64_t /*sequence_length*/) const override {
    const int64_t width = spec_.heads * spec_.head_dim, latent = spec_.head_dim;
    const int64_t projections = spec_.hidden_size * (4 * width + 2 * latent + spec_.heads) + 2 * latent * width;
    return 6.0 * static_cast<double>(projections + 3 * spec_.conv_width * width + 3 * width * spec_.head_dim);
  }
  void check_tensor_ranks(const std::string& model) const override {
    require(false, model +
                       " has layers of Kimi Delta Attention, which --tensor-model-parallel-size does not cut; leave it "
                       "out, and FSDP2 shards them over all ranks.");
  }
  void check_sequence_ranks(const std::string& model, int64_t ranks, int64_t /*tensor_parallel*/) const override {
    require(spec_.heads % ranks == 0, model + " has " + std::to_string(spec_.heads) +
                                          " heads in its linear attention, which " + std::to_string(ranks) +
                                          " ranks cannot share; choose a --context-parallel-size that divides them.");
  }
  void check_sequence_ring(const std::string& model) const override {
    require(false, model + " has layers of Kimi Delta Attention, whose state passes through the whole sequence, and a "
                           "ring has no rank with all of it; give --context-parallel-algo ulysses_cp_algo.");
  }
  std::vector<std::string> names_in_fp32() const override { return {"A_log", "dt_bias"}; }
  std::string norm_before() const override { return "attn_norm"; }

 private:
  KimiDeltaAttentionSpec spec_;
};

}  // namespace

PartSpecPtr kimi_delta_attention_part(KimiDeltaAttentionSpec spec) {
  return std::make_shared<KimiDeltaAttentionPart>(std::move(spec));
}

}  // namespace megashard
