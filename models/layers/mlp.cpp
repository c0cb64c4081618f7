#include "models/layers/mlp.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>

#include <utility>

#include "models/kernels/fused_ops.h"
#include "models/layers/tiled_mlp.h"

namespace megashard {

at::Tensor activate(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return at::silu(x);
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kRelu:
      return at::relu(x);
    case Activation::kSquaredRelu:
      return at::relu(x).square();
  }
  TORCH_INTERNAL_ASSERT(false, "activation without a body");
}

at::Tensor activated(const std::vector<at::Tensor>& wide, const MlpSpec& spec) {
  if (spec.is_swiglu()) return swiglu(wide[0], wide[1]);
  const auto active = activate(wide[0], spec.activation);
  return wide.size() == 1 ? active : active * wide[1];
}

double training_flops(const MlpSpec& spec) {
  const auto width = static_cast<double>(spec.intermediate_size) * (spec.gated ? 1.5 : 1.0);
  return 12.0 * static_cast<double>(spec.hidden_size) * width;
}

namespace {

class MlpPart final : public PartSpec {
 public:
  explicit MlpPart(MlpSpec spec) : spec_(std::move(spec)) {}

  std::shared_ptr<Part> build(const BuildContext& context) const override {
    return std::make_shared<PartOf<Mlp>>(spec_, context);
  }
  double training_flops(int64_t /*sequence_length*/) const override { return megashard::training_flops(spec_); }
  std::vector<SharedSize> sizes_over_ranks() const override {
    return {{spec_.intermediate_size, "channels of an MLP"}};
  }
  std::vector<std::string> paths_of(const std::string& megatron_part) const override {
    return megatron_part == "mlp" ? std::vector<std::string>{""} : std::vector<std::string>{};
  }
  std::string norm_before() const override { return "mlp_norm"; }

 private:
  MlpSpec spec_;
};

}  // namespace

PartSpecPtr mlp_part(MlpSpec spec) { return std::make_shared<MlpPart>(std::move(spec)); }

Mlp::Mlp(const MlpSpec& spec, const BuildContext& context)
    : spec_(spec), tiles_(context.mlp_tiles), ranks_(context.tensor_parallel) {
  const auto widening = [&](const char* name) {
    const Linear::Options options{.in = spec.hidden_size, .out = spec.intermediate_size, .bias = spec.bias};
    return register_module(name, std::make_shared<Hooked<ColumnParallelLinear>>(options, ranks_));
  };
  JointLinears::Layers layers;
  if (spec.gated) layers.push_back(widening("gate_proj"));
  layers.push_back(widening("up_proj"));
  widening_ = JointLinears(std::move(layers));
  const Linear::Options options{
      .in = spec.intermediate_size, .out = spec.hidden_size, .bias = spec.bias, .init_scale = spec.output_init_scale};
  down_proj_ = register_module("down_proj", std::make_shared<Hooked<RowParallelLinear>>(options, ranks_));
}

at::Tensor Mlp::forward(const at::Tensor& own) {
  const auto hidden = ranks_->enter(own);
  if (tiles_ == 1) return of_rows(hidden);
  auto self = shared_from_this();  // the graph may outlive the model
  const auto body = [this, self = std::move(self)](const at::Tensor& rows) { return of_rows(rows); };
  return tiled_rows(body, hidden, parameters(), tiles_);
}

at::Tensor Mlp::of_rows(const at::Tensor& hidden) {
  const auto wide = widening_.forward(hidden);
  if (spec_.is_swiglu() && down_proj_->is_transparent()) return down_proj_->forward_of_swiglu(wide[0], wide[1]);
  return down_proj_->forward(activated(wide, spec_));
}

}  // namespace megashard
