#include "models/layers/gated_delta_net.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>

#include <utility>
#include <vector>

#include "framework/mistakes.h"
#include "models/kernels/causal_conv.h"
#include "models/kernels/delta_rule.h"
#include "models/kernels/fused_ops.h"
#include "models/layers/channel_conv.h"
#include "models/layers/linear.h"
#include "models/layers/whole_sequence.h"

namespace megashard {
namespace {

class GatedDeltaNet : public torch::nn::Module, public SelfInitializing {
 public:
  GatedDeltaNet(const GatedDeltaNetSpec& spec, const BuildContext& context) : spec_(spec) {
    const int64_t keys = spec.key_heads * spec.key_dim, values = spec.value_heads * spec.value_dim;
    const auto projection = [&](const char* name, int64_t out) {
      const Linear::Options options{.in = spec.hidden_size, .out = out};
      return register_module(name, std::make_shared<Hooked<ColumnParallelLinear>>(options, context.tensor_parallel));
    };
    JointLinears::Layers layers;
    if (spec.packed) {
      layers.push_back(projection("in_proj_qkvz", 2 * keys + 2 * values));
      layers.push_back(projection("in_proj_ba", 2 * spec.value_heads));
    } else {
      layers.push_back(projection("in_proj_qkv", 2 * keys + values));
      layers.push_back(projection("in_proj_z", values));
      layers.push_back(projection("in_proj_b", spec.value_heads));
      layers.push_back(projection("in_proj_a", spec.value_heads));
    }
    projections_ = JointLinears(std::move(layers));
    conv_ = register_module("conv1d", std::make_shared<Hooked<ChannelConv>>(2 * keys + values, spec.conv_width));
    a_log_ = register_parameter("A_log", at::empty({spec.value_heads}));
    dt_bias_ = register_parameter("dt_bias", at::empty({spec.value_heads}));
    norm_ = register_module("norm", std::make_shared<Hooked<Norm>>(spec.norm));
    const Linear::Options options{.in = values, .out = spec.hidden_size, .init_scale = spec.output_init_scale};
    out_proj_ =
        register_module("out_proj", std::make_shared<Hooked<RowParallelLinear>>(options, context.tensor_parallel));
  }

  at::Tensor forward(const at::Tensor& own, const Pass& pass) {
    const auto x = projected(own);
    const WholeSequence sequence(pass);
    const auto whole = sequence.gather({x.q, x.k, x.v, x.write.unsqueeze(-1), x.decay.unsqueeze(-1)});
    const auto mixed = mix(whole[0], whole[1], whole[2], whole[3].squeeze(-1), whole[4].squeeze(-1), sequence);
    const auto heads = norm_->forward(sequence.scatter(mixed.to(own.scalar_type())));
    return out_proj_->forward(swiglu(x.gate.contiguous(), heads.contiguous()).flatten(2));
  }

  void init_own_weights(const WeightInit& init) override {
    a_log_.uniform_(0.01, 16, init.generator).log_();
    dt_bias_.fill_(1);
  }
  std::string class_name() const { return spec_.class_name; }

 private:
  struct Projected {
    at::Tensor q, k;          // [B, T, Hk, Dk]
    at::Tensor v, gate;       // [B, T, Hv, Dv]
    at::Tensor write, decay;  // [B, T, Hv]
  };

  Projected projected(const at::Tensor& own) const {
    const auto all = projections_.forward(own);
    const int64_t keys = spec_.key_heads * spec_.key_dim, values = spec_.value_heads * spec_.value_dim;
    const auto key_heads = [&](const at::Tensor& x) { return x.unflatten(2, {spec_.key_heads, -1}); };
    const auto value_heads = [&](const at::Tensor& x) {
      return x.reshape({x.size(0), x.size(1), spec_.value_heads, spec_.value_dim});
    };
    if (!spec_.packed) {
      const auto qkv = all[0].split_with_sizes({keys, keys, values}, -1);
      return {key_heads(qkv[0]), key_heads(qkv[1]), value_heads(qkv[2]), value_heads(all[1]), all[2], all[3]};
    }
    const int64_t sharing = spec_.value_heads / spec_.key_heads, shared = sharing * spec_.value_dim;
    const auto qkvz = key_heads(all[0]).split_with_sizes({spec_.key_dim, spec_.key_dim, shared, shared}, -1);
    const auto ba = key_heads(all[1]).split_with_sizes({sharing, sharing}, -1);
    return {qkvz[0], qkvz[1], value_heads(qkvz[2]), value_heads(qkvz[3]), ba[0].flatten(2), ba[1].flatten(2)};
  }

  /// Takes whole sequences of some heads; returns the rule's results, fp32.
  at::Tensor mix(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& write,
                 const at::Tensor& decay, const WholeSequence& sequence) const {
    const auto begins = sequence.begins(v);
    const int64_t keys = spec_.key_heads * spec_.key_dim;
    const auto taps = conv_->weight.squeeze(1).split_with_sizes({keys, keys, conv_->weight.size(0) - 2 * keys});
    const auto convolved = [&](const at::Tensor& heads, const at::Tensor& of_all, int64_t dim) {
      const auto own = sequence.of_rank(of_all.unflatten(0, {-1, dim})).flatten(0, 1);
      return at::silu(causal_conv(heads.flatten(2), own.to(heads.scalar_type()), begins))
          .to(at::kFloat)
          .unflatten(2, {-1, dim});
    };
    const auto rate = sequence.of_rank(a_log_).to(at::kFloat).exp();
    return gated_delta_rule({.q = convolved(q, taps[0], spec_.key_dim),
                             .k = convolved(k, taps[1], spec_.key_dim),
                             .v = convolved(v, taps[2], spec_.value_dim),
                             .decay = -rate * at::softplus(decay.to(at::kFloat) + sequence.of_rank(dt_bias_)),
                             .beta = at::sigmoid(write).to(at::kFloat),
                             .begins = begins});
  }

  GatedDeltaNetSpec spec_;
  JointLinears projections_;
  std::shared_ptr<Hooked<ChannelConv>> conv_;
  at::Tensor a_log_, dt_bias_;  // [Hv]
  std::shared_ptr<Hooked<Norm>> norm_;
  std::shared_ptr<Hooked<RowParallelLinear>> out_proj_;
};

class GatedDeltaNetPart final : public PartSpec {
 public:
  explicit GatedDeltaNetPart(GatedDeltaNetSpec spec) : spec_(std::move(spec)) {}

  std::shared_ptr<Part> build(const BuildContext& context) const override {
    return std::make_shared<PartOf<GatedDeltaNet>>(spec_, context);
  }
  /// Counts projections, convolution, and three products of a state for each token.
  double training_flops(int64_t /*sequence_length*/) const override {
    const int64_t keys = spec_.key_heads * spec_.key_dim, values = spec_.value_heads * spec_.value_dim;
    const int64_t projections = spec_.hidden_size * (2 * keys + 3 * values + 2 * spec_.value_heads);
    return 6.0 * static_cast<double>(projections + spec_.conv_width * (2 * keys + values) + 3 * values * spec_.key_dim);
  }
  void check_tensor_ranks(const std::string& model) const override {
    require(false, model +
                       " has layers of the gated delta rule, which --tensor-model-parallel-size does not cut; leave "
                       "it out, and FSDP2 shards them over all ranks.");
  }
  void check_sequence_ranks(const std::string& model, int64_t ranks, int64_t /*tensor_parallel*/) const override {
    require(spec_.key_heads % ranks == 0,
            model + " has " + std::to_string(spec_.key_heads) + " key heads in its linear attention, which " +
                std::to_string(ranks) + " ranks cannot share; choose a --context-parallel-size that divides them.");
  }
  void check_sequence_ring(const std::string& model) const override {
    require(false, model + " has layers of the gated delta rule, whose state passes through the whole sequence, and a "
                           "ring has no rank with all of it; give --context-parallel-algo ulysses_cp_algo.");
  }
  std::vector<std::string> names_in_fp32() const override { return {"A_log", "dt_bias"}; }
  std::string norm_before() const override { return "attn_norm"; }

 private:
  GatedDeltaNetSpec spec_;
};

}  // namespace

PartSpecPtr gated_delta_net_part(GatedDeltaNetSpec spec) {
  return std::make_shared<GatedDeltaNetPart>(std::move(spec));
}

}  // namespace megashard
