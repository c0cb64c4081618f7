#include "models/layers/short_conv.h"

#include <ATen/TensorOperators.h>

#include <utility>

#include "framework/mistakes.h"
#include "models/kernels/causal_conv.h"
#include "models/layers/channel_conv.h"
#include "models/layers/linear.h"
#include "models/layers/whole_sequence.h"

namespace megashard {
namespace {

class ShortConv : public torch::nn::Module {
 public:
  explicit ShortConv(const ShortConvSpec& spec) : class_name_(spec.class_name) {
    const int64_t hidden = spec.hidden_size;
    const auto linear = [&](const char* name, int64_t out, double init_scale) {
      const Linear::Options options{.in = hidden, .out = out, .bias = spec.bias, .init_scale = init_scale};
      return register_module(name, std::make_shared<Hooked<Linear>>(options));
    };
    conv_ = register_module("conv", std::make_shared<Hooked<ChannelConv>>(hidden, spec.width, spec.bias));
    in_proj_ = linear("in_proj", 3 * hidden, 1);
    out_proj_ = linear("out_proj", hidden, spec.output_init_scale);
  }

  at::Tensor forward(const at::Tensor& own, const Pass& pass) {
    const auto parts = in_proj_->forward(own).chunk(3, -1);
    const WholeSequence sequence(pass);
    const auto channels = sequence.gather({(parts[0] * parts[2]).unsqueeze(-1)})[0].squeeze(-1);
    auto mixed = causal_conv(channels, sequence.of_rank(conv_->weight).squeeze(1), sequence.begins(channels));
    if (conv_->bias.defined()) mixed = mixed + sequence.of_rank(conv_->bias);
    return out_proj_->forward(parts[1] * sequence.scatter(mixed.unsqueeze(-1)).squeeze(-1));
  }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<ChannelConv>> conv_;
  std::shared_ptr<Hooked<Linear>> in_proj_, out_proj_;
};

class ShortConvPart final : public PartSpec {
 public:
  explicit ShortConvPart(ShortConvSpec spec) : spec_(std::move(spec)) {}

  std::shared_ptr<Part> build(const BuildContext& /*context*/) const override {
    return std::make_shared<PartOf<ShortConv>>(spec_);
  }
  double training_flops(int64_t /*sequence_length*/) const override {
    return 6.0 * static_cast<double>(spec_.hidden_size * (4 * spec_.hidden_size + spec_.width));
  }
  void check_tensor_ranks(const std::string& model) const override {
    require(false, model +
                       " has layers of short convolutions, which --tensor-model-parallel-size does not cut; leave it "
                       "out, and FSDP2 shards them over all ranks.");
  }
  void check_sequence_ranks(const std::string& model, int64_t ranks, int64_t /*tensor_parallel*/) const override {
    require(spec_.hidden_size % ranks == 0,
            model + " has " + std::to_string(spec_.hidden_size) + " channels in its short convolutions, which " +
                std::to_string(ranks) + " ranks cannot share; choose a --context-parallel-size that divides them.");
  }
  void check_sequence_ring(const std::string& model) const override {
    require(false, model + " has layers of short convolutions, which read tokens that another rank of a ring has; give "
                           "--context-parallel-algo ulysses_cp_algo.");
  }
  std::string norm_before() const override { return "attn_norm"; }

 private:
  ShortConvSpec spec_;
};

}  // namespace

PartSpecPtr short_conv_part(ShortConvSpec spec) { return std::make_shared<ShortConvPart>(std::move(spec)); }

}  // namespace megashard
