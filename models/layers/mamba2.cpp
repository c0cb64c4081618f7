#include "models/layers/mamba2.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>

#include <cmath>
#include <utility>

#include "framework/mistakes.h"
#include "models/kernels/causal_conv.h"
#include "models/kernels/state_space.h"
#include "models/layers/channel_conv.h"
#include "models/layers/linear.h"
#include "models/layers/mlp.h"
#include "models/layers/whole_sequence.h"

namespace megashard {
namespace {

class Mamba2 : public torch::nn::Module, public SelfInitializing {
 public:
  explicit Mamba2(const Mamba2Spec& spec) : spec_(spec) {
    const int64_t width = spec.width(), convolved = width + 2 * spec.state_width();
    const auto linear = [&](const char* name, int64_t in, int64_t out, double init_scale) {
      const Linear::Options options{.in = in, .out = out, .bias = spec.bias, .init_scale = init_scale};
      return register_module(name, std::make_shared<Hooked<Linear>>(options));
    };
    in_proj_ = linear("in_proj", spec.hidden_size, width + convolved + spec.heads, 1);
    conv_ =
        register_module("conv1d", std::make_shared<Hooked<ChannelConv>>(convolved, spec.conv_width, spec.conv_bias));
    a_log_ = register_parameter("A_log", at::empty({spec.heads}));
    d_ = register_parameter("D", at::empty({spec.heads}));
    dt_bias_ = register_parameter("dt_bias", at::empty({spec.heads}));
    norm_ = register_module("norm", std::make_shared<Hooked<Norm>>(spec.norm));
    out_proj_ = linear("out_proj", width, spec.hidden_size, spec.output_init_scale);
  }

  at::Tensor forward(const at::Tensor& own, const Pass& pass) {
    const int64_t width = spec_.width(), states = spec_.state_width();
    const auto parts = in_proj_->forward(own).split_with_sizes({width, width, states, states, spec_.heads}, -1);
    const WholeSequence sequence(pass);
    const auto whole =
        sequence.gather({parts[1].unflatten(2, {spec_.heads, -1}), parts[2].unflatten(2, {spec_.groups, -1}),
                         parts[3].unflatten(2, {spec_.groups, -1}), parts[4].unsqueeze(-1)});
    const auto mixed = scan(whole[0], whole[1], whole[2], whole[3].squeeze(-1), sequence);
    const auto gated = sequence.scatter(mixed).flatten(2) * at::silu(parts[0].to(at::kFloat));
    return out_proj_->forward(norm_->forward(gated).to(own.scalar_type()));
  }

  void init_own_weights(const WeightInit& init) override {
    a_log_.copy_(at::arange(1, spec_.heads + 1, a_log_.options()).log());
    d_.fill_(1);
    // softplus(dt_bias) is a step whose logarithm is drawn evenly.
    const auto step = dt_bias_.uniform_(std::log(spec_.first_step), std::log(spec_.last_step), init.generator).exp_();
    step.clamp_min_(spec_.step_floor);
    dt_bias_.add_((-step).expm1().neg().log());
  }
  std::string class_name() const { return spec_.class_name; }

 private:
  /// Takes whole sequences of some heads x [B, T, h, P], b and c [B, T, g, N], step [B, T, h]; returns [B, T, h, P]
  /// fp32.
  at::Tensor scan(const at::Tensor& x, const at::Tensor& b, const at::Tensor& c, const at::Tensor& step,
                  const WholeSequence& sequence) const {
    const auto begins = sequence.begins(x);
    const auto convolved = [&](const at::Tensor& heads, int64_t first, int64_t channels) {
      const auto of_rank = [&](const at::Tensor& parameter) {
        const auto all = parameter.narrow(0, first, channels).unflatten(0, {-1, heads.size(3)});
        return sequence.of_rank(all).flatten(0, 1);
      };
      auto y = causal_conv(heads.flatten(2), of_rank(conv_->weight).squeeze(1), begins);
      if (conv_->bias.defined()) y = y + of_rank(conv_->bias);
      return activate(y, spec_.activation).to(at::kFloat).unflatten(2, {-1, heads.size(3)});
    };
    const int64_t width = spec_.width(), states = spec_.state_width();
    const auto values = convolved(x, 0, width);
    const auto own = [&](const at::Tensor& parameter) { return sequence.of_rank(parameter).to(at::kFloat); };
    const auto steps = at::softplus(step.to(at::kFloat) + own(dt_bias_)).clamp_min(spec_.first_step);
    const auto scanned = state_space_scan({.x = values,
                                           .step = steps,
                                           .rate = -own(a_log_).exp(),
                                           .b = convolved(b, width, states),
                                           .c = convolved(c, width + states, states),
                                           .begins = begins});
    return scanned + own(d_).unsqueeze(-1) * values;
  }

  Mamba2Spec spec_;
  std::shared_ptr<Hooked<Linear>> in_proj_, out_proj_;
  std::shared_ptr<Hooked<ChannelConv>> conv_;
  at::Tensor a_log_, d_, dt_bias_;  // [H]
  std::shared_ptr<Hooked<Norm>> norm_;
};

class Mamba2Part final : public PartSpec {
 public:
  explicit Mamba2Part(Mamba2Spec spec) : spec_(std::move(spec)) {}

  std::shared_ptr<Part> build(const BuildContext& /*context*/) const override {
    return std::make_shared<PartOf<Mamba2>>(spec_);
  }
  /// Counts projections, convolution, and two products of a state for each token.
  double training_flops(int64_t /*sequence_length*/) const override {
    const int64_t width = spec_.width(), convolved = width + 2 * spec_.state_width();
    const int64_t projections = spec_.hidden_size * (2 * width + convolved + spec_.heads);
    return 6.0 * static_cast<double>(projections + spec_.conv_width * convolved + 2 * width * spec_.state_dim);
  }
  void check_tensor_ranks(const std::string& model) const override {
    require(false, model + " has layers of Mamba-2, which --tensor-model-parallel-size does not cut; leave it out, and "
                           "FSDP2 shards them over all ranks.");
  }
  void check_sequence_ranks(const std::string& model, int64_t ranks, int64_t /*tensor_parallel*/) const override {
    require(spec_.groups % ranks == 0, model + " has " + std::to_string(spec_.groups) +
                                           " groups of heads in its Mamba-2 layers, which " + std::to_string(ranks) +
                                           " ranks cannot share; choose a --context-parallel-size that divides them.");
  }
  void check_sequence_ring(const std::string& model) const override {
    require(false, model + " has layers of Mamba-2, whose state passes through the whole sequence, and a ring has no "
                           "rank with all of it; give --context-parallel-algo ulysses_cp_algo.");
  }
  std::vector<std::string> names_in_fp32() const override { return {"A_log", "D", "dt_bias"}; }
  std::string norm_before() const override { return "attn_norm"; }

 private:
  Mamba2Spec spec_;
};

}  // namespace

PartSpecPtr mamba2_part(Mamba2Spec spec) { return std::make_shared<Mamba2Part>(std::move(spec)); }

}  // namespace megashard
