#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/config/decoder_config.h"
#include "models/layers/linear.h"
#include "models/layers/part.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// body(x) for x [B, T, C] in pieces along T, with one piece's activations in memory at a time (TiledMLP of ROLL and
/// DeepSpeed): saves only x for backward, which recomputes each piece. `body` maps each row independently and gets the
/// same random numbers from the default generators both times. `parameters` are all that it reads; their gradients are
/// summed over the pieces and returned once. At most T pieces; one piece is body(x) itself. No second derivative.
at::Tensor tiled_rows(const std::function<at::Tensor(const at::Tensor&)>& body, const at::Tensor& x,
                      const std::vector<at::Tensor>& parameters, int64_t pieces);

at::Tensor activate(const at::Tensor& x, Activation activation);

/// down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate.
struct MlpSpec {
  std::string class_name{};  ///< for wrap policies
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  Activation activation = Activation::kSilu;
  bool gated = true;
  bool bias = false;
  double output_init_scale = 1;          ///< factor of the initialisation's std for down_proj
  std::optional<ClampedGate> clamped{};  ///< instead of act(gate(x)) * up(x)

  bool is_swiglu() const { return gated && activation == Activation::kSilu && !clamped; }
};

/// Activation of the outputs [..., I] of gate_proj and up_proj, act(gate) * up, or of up_proj alone.
at::Tensor activated(const std::vector<at::Tensor>& wide, const MlpSpec& spec);

/// Floating-point operations of forward and backward per token.
double training_flops(const MlpSpec& spec);
/// An MLP as a part of a layer.
PartSpecPtr mlp_part(MlpSpec spec);

/// Projections gate_proj, up_proj, down_proj, sharded over tensor parallel ranks.
class Mlp : public torch::nn::Module {
 public:
  /// From hidden states to hidden states.
  explicit Mlp(const MlpSpec& spec, const BuildContext& context = {});

  at::Tensor forward(const at::Tensor& hidden);  // [..., C] -> [..., C]
  std::string class_name() const { return spec_.class_name; }

 private:
  at::Tensor of_rows(const at::Tensor& hidden);

  MlpSpec spec_;
  int64_t tiles_;
  TensorParallelRanksPtr ranks_;
  JointLinears widening_;  // gate_proj and up_proj, or up_proj
  std::shared_ptr<Hooked<RowParallelLinear>> down_proj_;
};

}  // namespace megashard
