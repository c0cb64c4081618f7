#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "framework/batch.h"
#include "models/diffusion/latent_parts.h"
#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "parallel/fsdp/hooked_module.h"
#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// Text and patches of a picture, which attend to each other as one sequence (MMDiT: Flux, Qwen-Image). A rank has the
/// same part of both.
struct Streams {
  at::Tensor image, text;  // [B, rows, C]

  template <class F>
  void visit_tensors(F&& f) {
    f(image);
    f(text);
  }
};

/// Inputs that all blocks of a forward share. Rows are this rank's, those of the text first.
struct JointPass {
  at::Tensor time;        // silu of what modulates [B, C]
  at::Tensor turns;       // patch_turns [B, rows, D / 2]
  at::Tensor key_mask{};  // [B, text and patches] bool of the whole sequence; undefined: no padding
  SequenceShard sequence{};

  template <class F>
  void visit_tensors(F&& f) {
    f(time);
    f(turns);
    f(key_mask);
  }
};

/// This rank's rows of text features, padded to a number that its ranks divide, and of what belongs to them.
struct JointRows {
  at::Tensor text;        // [B, rows, D]
  at::Tensor numbers;     // [rows] int64: places in the text
  at::Tensor key_mask{};  // JointPass::key_mask
  SequenceShard sequence{};
};
/// `text_mask` [B, L]: may be undefined. Throws if the ranks do not divide the patches. Collective with masks.
JointRows joint_rows(const Batch& input, const at::Tensor& text, const at::Tensor& text_mask);

struct JointSizes {
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t width() const { return num_heads * head_dim; }
};

/// Attention of text and patches with projections of their own: to_q, to_k, to_v, norm_q, norm_k, to_out.0 of patches,
/// add_q_proj, add_k_proj, add_v_proj, norm_added_q, norm_added_k, to_add_out of text.
class JointAttention : public torch::nn::Module {
 public:
  JointAttention(std::string class_name, const JointSizes& sizes);

  Streams forward(const Streams& normed, const JointPass& pass);
  std::string class_name() const { return class_name_; }

 private:
  struct Projections {
    std::array<std::shared_ptr<Hooked<Linear>>, 3> of;  // queries, keys, values
    std::array<std::shared_ptr<Hooked<Norm>>, 2> norms;
  };

  std::string class_name_;
  int64_t num_heads_;
  Projections image_, text_;
  std::shared_ptr<Hooked<Linear>> to_out_, to_add_out_;
};

/// Names that differ between models.
struct JointBlockNames {
  std::string block, attention;                   ///< classes
  std::string image_modulation, text_modulation;  ///< paths of linear layers
  std::string image_mlp, text_mlp;
};

/// Joint attention, then an MLP of each stream; both modulated by shift, scale and gate.
class JointBlock : public torch::nn::Module {
 public:
  JointBlock(const JointBlockNames& names, const JointSizes& sizes);

  Streams forward(const Streams& hidden, const JointPass& pass);
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<Linear>> image_modulation_, text_modulation_;
  std::shared_ptr<Hooked<JointAttention>> attn_;
  std::shared_ptr<Hooked<FeedForward>> image_mlp_, text_mlp_;
};

/// Registers norm_q, norm_k and the like: an RMSNorm of each head.
std::shared_ptr<Hooked<Norm>> register_head_norm(torch::nn::Module& module, const char* name, int64_t head_dim);
/// Attention of queries, keys and values [B, rows, H, D] that are not yet turned -> [B, rows, C].
at::Tensor joint_mix(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const JointPass& pass);
/// `count` vectors [B, 1, C] in fp32 from a layer's output [B, count C].
std::vector<at::Tensor> modulations(const at::Tensor& output, int64_t count);

inline constexpr double kJointEps = 1e-6;

}  // namespace megashard
