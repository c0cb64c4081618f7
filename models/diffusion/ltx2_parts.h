#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "framework/modules/weight_init_mixin.h"
#include "models/diffusion/latent_parts.h"
#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "parallel/fsdp/hooked_module.h"
#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// How a head's channels pair up to turn.
enum class LtxTurns { kNeighbours, kHalves };

struct Ltx2Sizes {
  int64_t num_heads = 32;
  int64_t head_dim = 128, sound_head_dim = 64;
  LtxTurns turns = LtxTurns::kNeighbours;
  double eps = 1e-6;

  int64_t width() const { return num_heads * head_dim; }
  int64_t sound_width() const { return num_heads * sound_head_dim; }
};

/// What all blocks take of a stream besides its hidden states. S = 2 if some patches are given clean.
struct Ltx2Stream {
  at::Tensor changes;                    // [B, S, 6 C]: of attention to itself and of the MLP
  at::Tensor cross_changes, cross_gate;  // [B, S, 4 C], [B, S, C]: of attention to the other stream
  at::Tensor text, text_mask{};          // [B, L, C], [B, L] bool; undefined mask: no padding
  at::Tensor turns, cross_turns;         // [B, rows, H, D / 2] complex: within the stream, and to the other one

  template <class F>
  void visit_tensors(F&& f) {
    for (at::Tensor* each : {&changes, &cross_changes, &cross_gate, &text, &text_mask, &turns, &cross_turns}) f(*each);
  }
};

/// Where a stream's rows are on this rank, and which of them count.
struct Ltx2Rows {
  at::Tensor clean{};          // [B, rows] bool: patches that take the second of S = 2 changes; undefined: S = 1
  at::Tensor key_mask{};       // [B, length] bool of the whole sequence; undefined: no padding
  at::Tensor gathered_mask{};  // key_mask in the order of the ranks
  SequenceShard sequence{};

  template <class F>
  void visit_tensors(F&& f) {
    for (at::Tensor* each : {&clean, &key_mask, &gathered_mask}) f(*each);
  }
};

/// Inputs that all blocks of a forward share.
struct Ltx2Pass {
  Ltx2Stream video, sound;
  Ltx2Rows rows;  // of the video; each rank has the whole sound

  template <class F>
  void visit_tensors(F&& f) {
    video.visit_tensors(f);
    sound.visit_tensors(f);
    rows.visit_tensors(f);
  }
};

/// Hidden states of patches and of a sound's steps.
struct VideoAndSound {
  at::Tensor video, sound;  // [B, rows, C]; undefined sound: none

  template <class F>
  void visit_tensors(F&& f) {
    f(video);
    f(sound);
  }
};

/// emb.timestep_embedder, linear: an embedding of timesteps and `count` vectors made of it.
class Ltx2TimeEmbedding : public torch::nn::Module {
 public:
  Ltx2TimeEmbedding(int64_t width, int64_t count);

  struct Output {
    at::Tensor changes, embedding;  // [B, S, count C], [B, S, C]
    template <class F>
    void visit_tensors(F&& f) {
      f(changes);
      f(embedding);
    }
  };
  Output forward(const at::Tensor& timesteps);  // [B, S]
  std::string class_name() const { return "LTX2AdaLayerNormSingle"; }

 private:
  std::shared_ptr<Hooked<LatentMlp>> embedder_;
  std::shared_ptr<Hooked<Linear>> linear_;
};

/// to_q, to_k, to_v, to_out.0, norm_q, norm_k.
class Ltx2Attention : public torch::nn::Module {
 public:
  struct Widths {
    int64_t queries, keys, inner;
  };
  Ltx2Attention(const Widths& widths, const Ltx2Sizes& sizes);

  /// Where queries find their keys.
  struct Keys {
    at::Tensor source;                  // [B, S, keys]
    at::Tensor query_turns{}, turns{};  // undefined: nothing turns
    at::Tensor mask{};                  // [B, all keys] bool; undefined: all count
    SequenceShard sequence{};           // whose rows the source has
    bool is_itself = false;             // queries are rows of that sequence, too; or else each rank has all of them

    template <class F>
    void visit_tensors(F&& f) {
      for (at::Tensor* each : {&source, &query_turns, &turns, &mask}) f(*each);
    }
  };
  at::Tensor forward(const at::Tensor& x, const Keys& keys);  // [B, T, queries]
  std::string class_name() const { return "LTX2Attention"; }

 private:
  at::Tensor turned(const at::Tensor& heads, const at::Tensor& turns) const;

  int64_t num_heads_;
  LtxTurns turns_;
  std::shared_ptr<Hooked<Norm>> norm_q_, norm_k_;
  std::shared_ptr<Hooked<Linear>> to_q_, to_k_, to_v_, to_out_;
};

/// Attention of each stream to itself, to the text and to the other stream, then an MLP.
class Ltx2Block : public torch::nn::Module, public SelfInitializing {
 public:
  explicit Ltx2Block(const Ltx2Sizes& sizes);

  VideoAndSound forward(const VideoAndSound& hidden, const Ltx2Pass& pass);
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "LTX2VideoTransformerBlock"; }

 private:
  /// One stream's modules.
  struct Parts {
    std::shared_ptr<Hooked<Ltx2Attention>> itself, text, other;
    std::shared_ptr<Hooked<FeedForward>> ff;
    at::Tensor table, cross_table;  // [6, C], [5, C]
  };
  Parts register_parts(const std::string& prefix, int64_t width, const Ltx2Sizes& sizes);
  /// Attention to the stream itself, then to the text.
  at::Tensor attend(const Parts& parts, const at::Tensor& x, const std::vector<at::Tensor>& changes,
                    const Ltx2Stream& stream, const Ltx2Rows& rows);
  VideoAndSound attend_across(const VideoAndSound& hidden, const Ltx2Pass& pass);

  double eps_;
  Parts video_, sound_;
};

}  // namespace megashard
