#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "framework/modules/weight_init_mixin.h"
#include "models/layers/linear.h"
#include "models/layers/mlp.h"
#include "models/layers/norm.h"
#include "models/layers/pass.h"
#include "models/vision/vision_plan.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Inputs that all layers of a tower's forward share.
struct VisionContext {
  RotaryTables rotary;  // [P, head / 2]; undefined: no rotation
  Segments segments;

  template <class F>
  void visit_tensors(F&& f) {
    rotary.visit_tensors(f);
    segments.visit_tensors(f);
  }
};

/// Tables of the angles positions x frequencies, in fp32. positions [P, 2]; frequencies [n], or [2, n] by axis: the
/// first n channel pairs turn by the row, the others by the column.
RotaryTables vision_tables(const at::Tensor& frequencies, const at::Tensor& positions);

/// A convolution over patches that do not overlap, computed as a product with the flattened weight, whose sizes are
/// those in the files.
class PatchConvolution : public torch::nn::Module, public SelfInitializing {
 public:
  /// `sizes`: of the weight, [hidden, channels, (frames,) rows, columns].
  PatchConvolution(at::IntArrayRef sizes, bool has_bias);

  at::Tensor forward(const at::Tensor& patches);  // [P, pixels] -> [P, hidden]
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return weight.dim() == 5 ? "Conv3d" : "Conv2d"; }

  at::Tensor weight;
  at::Tensor bias;  // [hidden]; undefined: none
};

/// Patches [P, ...] in the order of the plan, from the given one.
at::Tensor in_tower_order(const at::Tensor& patches, const VisionPlan& plan);
/// Features [P / merge^2, ...] in the given order, from that of the plan.
at::Tensor in_given_order(const at::Tensor& features, const VisionPlan& plan);

/// hidden [P, C] + the learned positions of the plan, rows of table [rows, C].
at::Tensor interpolated_positions(const at::Tensor& table, const at::Tensor& hidden, const VisionPlan& plan);

/// Turns channels 2 i and 2 i + 1 of a head by angle i, in the dtype of the tables: x [P, H, D] -> [P, H, D], whose
/// halves have the even and the odd channels.
at::Tensor turned_neighbours(const at::Tensor& x, const RotaryTables& rotary);

Segments on_device(const Segments& segments, c10::Device device);

/// Attention of [P, H, D] within the segments, one call for all segments of a length.
at::Tensor attend_within(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Segments& segments);

/// fc2(act(fc1(x))), with biases.
struct PlainMlpSpec {
  std::string class_name{};                        ///< for wrap policies
  std::array<std::string, 2> names{"fc1", "fc2"};  ///< of the linear layers
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  Activation activation = Activation::kGeluTanh;
};

class PlainMlp : public torch::nn::Module {
 public:
  explicit PlainMlp(const PlainMlpSpec& spec);

  at::Tensor forward(const at::Tensor& hidden);
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  Activation activation_;
  std::shared_ptr<Hooked<Linear>> fc1_, fc2_;
};

/// x + attention(norm(x)), then x + mlp(norm(x)), with separate projections of queries, keys and values.
struct TowerLayerSpec {
  std::string class_name{}, attention_class{};  ///< for wrap policies
  std::array<std::string, 2> norms{}, parts{};  ///< names of the modules: attention's, then the MLP's
  std::string out_proj = "out_proj";            ///< name of the projection behind attention
  NormSpec norm{};
  int64_t num_heads = 0;
  bool qkv_bias = false, out_bias = false;
  std::optional<NormSpec> qk_norm{};  ///< norms all heads of queries together, and those of keys: q_norm, k_norm
  std::variant<MlpSpec, PlainMlpSpec> mlp{};
  std::array<std::string, 2> scales{};  ///< names of vectors that multiply the branches' outputs; empty: there are none
  double first_scale = 1;               ///< initial value of those
  double drop_path = 0;                 ///< probability that training leaves out a branch for a segment of patches
};

/// Projections q_proj, k_proj, v_proj and out_proj.
class TowerAttention : public torch::nn::Module {
 public:
  explicit TowerAttention(const TowerLayerSpec& spec);

  at::Tensor forward(const at::Tensor& hidden, const VisionContext& context);  // [P, E] -> [P, E]
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  int64_t num_heads_;
  JointLinears projections_;
  std::array<std::shared_ptr<Hooked<Norm>>, 2> qk_norms_;  // null: none
  std::shared_ptr<Hooked<Linear>> out_proj_;
};

class TowerLayer : public torch::nn::Module, public SelfInitializing {
 public:
  explicit TowerLayer(const TowerLayerSpec& spec);

  at::Tensor forward(const at::Tensor& hidden, const VisionContext& context);
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return class_name_; }

 private:
  /// hidden + the output of branch `index`.
  at::Tensor add(const at::Tensor& hidden, at::Tensor branch, size_t index, const Segments& segments) const;

  std::string class_name_;
  double first_scale_, drop_path_;
  std::array<at::Tensor, 2> scales_;  // undefined: none
  std::array<std::shared_ptr<Hooked<Norm>>, 2> norms_;
  std::shared_ptr<Hooked<TowerAttention>> attention_;
  std::shared_ptr<Hooked<Mlp>> gated_mlp_;  // one of both
  std::shared_ptr<Hooked<PlainMlp>> mlp_;
};

/// The layers of a tower, one after the other, in a list of that name. `drop_path` grows from 0 at the first layer to
/// the spec's at the last.
class TowerStack : public torch::nn::Module {
 public:
  TowerStack(std::string class_name, TowerLayerSpec layer, int64_t depth, const std::string& list = "layers");

  at::Tensor forward(at::Tensor hidden, const VisionContext& context);
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::vector<std::shared_ptr<Hooked<TowerLayer>>> layers_;
};

}  // namespace megashard
