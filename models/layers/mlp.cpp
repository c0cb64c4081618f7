#include "models/layers/mlp.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "framework/recompute/call_state.h"
#include "models/kernels/fused_ops.h"
#include "models/layers/fused_forms.h"
#include "parallel/device/torch_versions.h"

namespace megashard {
namespace {

using RowsBody = std::function<at::Tensor(const at::Tensor&)>;
using torch::autograd::variable_list;

/// Calls `work` with the first row and the number of rows of each piece.
template <class F>
void for_each_piece(int64_t rows, int64_t pieces, const F& work) {
  const int64_t each = (rows + pieces - 1) / pieces;
  for (int64_t begin = 0; begin < rows; begin += each) work(begin, std::min(each, rows - begin));
}

/// Inputs: x, then the parameters.
class TiledRowsNode final : public torch::autograd::Node {
 public:
  /// `states`: one per piece, from before it ran.
  TiledRowsNode(torch::autograd::edge_list next, RowsBody body, const at::Tensor& x, std::vector<at::Tensor> parameters,
                int64_t pieces, std::vector<CallState> states)
      : Node(std::move(next)),
        body_(std::move(body)),
        x_(x, /*is_output=*/false),
        parameters_(std::move(parameters)),
        pieces_(pieces),
        states_(std::move(states)) {}

  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK(!at::GradMode::is_enabled(), "a tiled MLP has no second derivative: turn tiling off to compute one");
    variable_list results(1 + parameters_.size());
    if (!gradients[0].defined()) return results;
    const at::Tensor x = x_.unpack();
    results[0] = at::empty_like(x);
    auto state = states_.begin();
    for_each_piece(x.size(1), pieces_, [&](int64_t begin, int64_t rows) {
      add_piece(results, x.narrow(1, begin, rows), gradients[0].narrow(1, begin, rows), begin, *state++);
    });
    return results;
  }
  void release_variables() override {
    x_.reset_data();
    parameters_.clear();
    states_.clear();
    body_ = nullptr;
  }
  std::string name() const override { return "TiledRows"; }

 private:
  void add_piece(variable_list& results, const at::Tensor& x, const at::Tensor& gradient, int64_t begin,
                 const CallState& state) const {
    const CallState::Replayed replayed(state);  // with grad mode on
    variable_list inputs{x.detach().requires_grad_()};
    inputs.insert(inputs.end(), parameters_.begin(), parameters_.end());
    const auto of_piece = torch::autograd::grad({body_(inputs[0])}, inputs, {gradient}, /*retain_graph=*/false,
                                                /*create_graph=*/false, /*allow_unused=*/true);
    const at::NoGradGuard no_grad;
    results[0].narrow(1, begin, x.size(1)).copy_(of_piece[0]);
    for (size_t i = 1; i < inputs.size(); ++i) {
      if (!of_piece[i].defined()) continue;
      if (results[i].defined()) {
        results[i].add_(of_piece[i]);
      } else {
        results[i] = of_piece[i];
      }
    }
  }

  RowsBody body_;
  torch::autograd::SavedVariable x_;
  std::vector<at::Tensor> parameters_;  // leaves; they outlive the graph
  int64_t pieces_;
  std::vector<CallState> states_;
};

/// Adds one of `states` per piece; null: not needed.
at::Tensor forward_by_pieces(const RowsBody& body, const at::Tensor& x, int64_t pieces,
                             std::vector<CallState>* states) {
  const at::NoGradGuard no_grad;
  at::Tensor out;
  for_each_piece(x.size(1), pieces, [&](int64_t begin, int64_t rows) {
    if (states != nullptr) states->emplace_back(std::vector<at::Tensor>{x}, /*rng=*/true, std::vector<at::Generator>{});
    const at::Tensor piece = body(x.narrow(1, begin, rows));
    if (!out.defined()) out = at::empty({x.size(0), x.size(1), piece.size(2)}, piece.options());
    out.narrow(1, begin, rows).copy_(piece);
  });
  return out;
}

}  // namespace

at::Tensor tiled_rows(const RowsBody& body, const at::Tensor& x, const std::vector<at::Tensor>& parameters,
                      int64_t pieces) {
  TORCH_CHECK(pieces > 0 && x.dim() == 3, "tiling needs [batch, rows, channels] and a positive number of pieces, got ",
              x.sizes(), " and ", pieces);
  if (pieces == 1 || x.size(1) <= 1) return body(x);
  std::vector<at::Tensor> trained;
  for (const auto& parameter : parameters) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  const bool has_graph = at::GradMode::is_enabled() && (!trained.empty() || x.requires_grad());
  std::vector<CallState> states;
  const at::Tensor out = forward_by_pieces(body, x, pieces, has_graph ? &states : nullptr);
  if (!has_graph) return out;
  torch::autograd::edge_list edges{x.requires_grad() ? torch::autograd::impl::gradient_edge(x)
                                                     : torch::autograd::Edge()};
  for (const auto& parameter : trained) edges.push_back(torch::autograd::impl::gradient_edge(parameter));
  const auto node = make_node<TiledRowsNode>(std::move(edges), body, x, std::move(trained), pieces, std::move(states));
  torch::autograd::impl::set_gradient_edge(out, {node, node->add_input_metadata(out)});
  return out;
}

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
    case Activation::kQuickGelu:
      return x * at::sigmoid(x * 1.702);
  }
  TORCH_INTERNAL_ASSERT(false, "activation without a body");
}

at::Tensor activated(const std::vector<at::Tensor>& wide, const MlpSpec& spec) {
  if (spec.is_swiglu()) return swiglu(wide[0], wide[1]);
  if (spec.clamped) {
    const auto [alpha, limit] = *spec.clamped;
    const auto gate = wide[0].clamp_max(limit), up = wide[1].clamp(-limit, limit);
    return (up + 1) * (gate * at::sigmoid(gate * alpha));
  }
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
  std::vector<WeightGroup> weight_forms(const std::string& path, const WeightFiles& files) const override {
    if (files.fused.gate_up.empty() || !spec_.gated) return {};
    const int64_t rows = spec_.intermediate_size;
    return {fused_forms(path, {{"gate_proj", rows}, {"up_proj", rows}}, files.fused.gate_up, spec_.hidden_size,
                        spec_.bias)};
  }
  std::vector<std::string> paths_of(const std::string& megatron_part) const override {
    return megatron_part == "mlp" ? std::vector<std::string>{""} : std::vector<std::string>{};
  }
  bool continues_from_cache() const override { return true; }
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
