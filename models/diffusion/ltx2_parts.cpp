#include "models/diffusion/ltx2_parts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cmath>
#include <utility>

#include "models/kernels/fused_ops.h"
#include "models/layers/full_attention.h"
#include "parallel/tensor_parallel/tensor_parallel_regions.h"

namespace megashard {
namespace {

constexpr int64_t kLtxWaves = 256;

/// The keys [B, length, H, D] of a sequence from this rank's rows, in the order of the ranks.
at::Tensor gathered_rows(const at::Tensor& rows, const SequenceShard& sequence) {
  if (sequence.is_whole()) return rows;
  const auto all = gather_from_sequence_parallel_region(rows.flatten(2).contiguous(), sequence.group);
  return all.unflatten(-1, {rows.size(2), rows.size(3)});
}

/// Vectors of a table [n, C] that change with the timestep: `count` from row `first` on, [B, S, C] each in fp32.
std::vector<at::Tensor> with_table(const at::Tensor& table, const at::Tensor& changes, int64_t first, int64_t count) {
  const auto rows = table.narrow(0, first, count).to(at::kFloat);
  return (rows + changes.to(at::kFloat).unflatten(-1, {count, -1})).unbind(2);
}

}  // namespace

Ltx2TimeEmbedding::Ltx2TimeEmbedding(int64_t width, int64_t count) {
  const LatentMlpSpec spec{.class_name = "TimestepEmbedding",
                           .in = kLtxWaves,
                           .inner = width,
                           .out = width,
                           .activation = Activation::kSilu};
  const auto inner = register_module("emb", std::make_shared<torch::nn::ModuleListImpl>());
  embedder_ = inner->register_module("timestep_embedder", std::make_shared<Hooked<LatentMlp>>(spec));
  const Linear::Options options{.in = width, .out = count * width, .bias = true, .init_scale = 0};
  linear_ = register_module("linear", std::make_shared<Hooked<Linear>>(options));
}

Ltx2TimeEmbedding::Output Ltx2TimeEmbedding::forward(const at::Tensor& timesteps) {
  const auto embedding = embedder_->forward(timestep_waves(timesteps, kLtxWaves));
  return {.changes = linear_->forward(at::silu(embedding)), .embedding = embedding};
}

Ltx2Attention::Ltx2Attention(const Widths& widths, const Ltx2Sizes& sizes)
    : num_heads_(sizes.num_heads), turns_(sizes.turns) {
  const auto linear = [&](const char* name, int64_t in) {
    return register_module(name, std::make_shared<Hooked<Linear>>(xavier_linear(in, widths.inner)));
  };
  const auto norm = [&](const char* name) {
    const NormSpec spec{.class_name = "RMSNorm", .width = widths.inner, .eps = sizes.eps};
    return register_module(name, std::make_shared<Hooked<Norm>>(spec));
  };
  norm_q_ = norm("norm_q");
  norm_k_ = norm("norm_k");
  to_q_ = linear("to_q", widths.queries);
  to_k_ = linear("to_k", widths.keys);
  to_v_ = linear("to_v", widths.keys);
  to_out_ = register_linear_at(*this, "to_out.0", xavier_linear(widths.inner, widths.queries));
}

at::Tensor Ltx2Attention::turned(const at::Tensor& heads, const at::Tensor& turns) const {
  if (!turns.defined()) return heads;
  const auto wide = heads.to(at::kFloat);
  if (turns_ == LtxTurns::kNeighbours) {
    const auto pairs = at::view_as_complex(wide.unflatten(-1, {-1, 2}).contiguous());
    return at::view_as_real(pairs * turns).flatten(-2).to(heads.scalar_type());
  }
  const auto halves = wide.chunk(2, -1);
  const auto product = at::view_as_real(at::complex(halves[0].contiguous(), halves[1].contiguous()) * turns);
  return at::cat({product.select(-1, 0), product.select(-1, 1)}, -1).to(heads.scalar_type());
}

at::Tensor Ltx2Attention::forward(const at::Tensor& x, const Keys& keys) {
  const auto heads = [this](const at::Tensor& each) { return each.unflatten(-1, {num_heads_, -1}); };
  const auto q = turned(heads(norm_q_->forward(to_q_->forward(x))), keys.query_turns);
  const auto k = turned(heads(norm_k_->forward(to_k_->forward(keys.source))), keys.turns);
  const auto v = heads(to_v_->forward(keys.source));
  if (keys.is_itself) return to_out_->forward(full_self_attention(q, k, v, keys.mask, keys.sequence).flatten(2));
  const auto all = gathered_rows(at::cat({k, v}, -1), keys.sequence).chunk(2, -1);
  return to_out_->forward(full_attention(q, all[0], all[1], keys.mask).flatten(2));
}

Ltx2Block::Ltx2Block(const Ltx2Sizes& sizes) : eps_(sizes.eps) {
  const int64_t width = sizes.width(), sound_width = sizes.sound_width();
  video_ = register_parts("", width, sizes);
  sound_ = register_parts("audio_", sound_width, sizes);
  const auto across = [&](const char* name, int64_t queries, int64_t keys) {
    const Ltx2Attention::Widths widths{.queries = queries, .keys = keys, .inner = sound_width};
    return register_module(name, std::make_shared<Hooked<Ltx2Attention>>(widths, sizes));
  };
  video_.other = across("audio_to_video_attn", width, sound_width);
  sound_.other = across("video_to_audio_attn", sound_width, width);
  video_.cross_table = register_parameter("video_a2v_cross_attn_scale_shift_table", at::empty({5, width}));
  sound_.cross_table = register_parameter("audio_a2v_cross_attn_scale_shift_table", at::empty({5, sound_width}));
}

Ltx2Block::Parts Ltx2Block::register_parts(const std::string& prefix, int64_t width, const Ltx2Sizes& sizes) {
  const auto attention = [&](const char* name) {
    const Ltx2Attention::Widths widths{.queries = width, .keys = width, .inner = width};
    return register_module(prefix + name, std::make_shared<Hooked<Ltx2Attention>>(widths, sizes));
  };
  Parts parts{
      .itself = attention("attn1"), .text = attention("attn2"), .other = {}, .ff = {}, .table = {}, .cross_table = {}};
  parts.ff = register_module(prefix + "ff",
                             std::make_shared<Hooked<FeedForward>>(width, 4 * width, width, Activation::kGeluTanh));
  parts.table = register_parameter(prefix + "scale_shift_table", at::empty({6, width}));
  return parts;
}

at::Tensor Ltx2Block::attend(const Parts& parts, const at::Tensor& x, const std::vector<at::Tensor>& changes,
                             const Ltx2Stream& stream, const Ltx2Rows& rows) {
  const auto normed = modulated_norm(x, {changes[1] + 1, changes[0]}, rows.clean, eps_, NormKind::kRmsNorm);
  const auto mixed = parts.itself->forward(normed, Ltx2Attention::Keys{.source = normed,
                                                                       .query_turns = stream.turns,
                                                                       .turns = stream.turns,
                                                                       .mask = rows.key_mask,
                                                                       .sequence = rows.sequence,
                                                                       .is_itself = true});
  const auto y = gated_sum(x, mixed, changes[2], rows.clean);
  const auto plain = rms_norm(y, at::ones({y.size(-1)}, y.options()), eps_);
  return y + parts.text->forward(plain, Ltx2Attention::Keys{.source = stream.text, .mask = stream.text_mask});
}

VideoAndSound Ltx2Block::attend_across(const VideoAndSound& hidden, const Ltx2Pass& pass) {
  const auto of_video = with_table(video_.cross_table, pass.video.cross_changes, 0, 4);
  const auto of_sound = with_table(sound_.cross_table, pass.sound.cross_changes, 0, 4);
  const auto video_gate = with_table(video_.cross_table, pass.video.cross_gate, 4, 1)[0];
  const auto sound_gate = with_table(sound_.cross_table, pass.sound.cross_gate, 4, 1)[0];
  const auto& clean = pass.rows.clean;
  const auto video_for = [&](size_t first) {
    return modulated_norm(hidden.video, {of_video[first] + 1, of_video[first + 1]}, clean, eps_, NormKind::kRmsNorm);
  };
  const auto sound_for = [&](size_t first) {
    return modulated_norm(hidden.sound, {of_sound[first] + 1, of_sound[first + 1]}, {}, eps_, NormKind::kRmsNorm);
  };
  const auto to_video = video_.other->forward(video_for(0), Ltx2Attention::Keys{.source = sound_for(0),
                                                                                .query_turns = pass.video.cross_turns,
                                                                                .turns = pass.sound.cross_turns});
  const auto to_sound = sound_.other->forward(sound_for(2), Ltx2Attention::Keys{.source = video_for(2),
                                                                                .query_turns = pass.sound.cross_turns,
                                                                                .turns = pass.video.cross_turns,
                                                                                .mask = pass.rows.gathered_mask,
                                                                                .sequence = pass.rows.sequence});
  return {.video = gated_sum(hidden.video, to_video, video_gate, clean),
          .sound = gated_sum(hidden.sound, to_sound, sound_gate, {})};
}

VideoAndSound Ltx2Block::forward(const VideoAndSound& hidden, const Ltx2Pass& pass) {
  const auto of_video = with_table(video_.table, pass.video.changes, 0, 6);
  const auto through_mlp = [this](const Parts& parts, const at::Tensor& x, const std::vector<at::Tensor>& changes,
                                  const at::Tensor& clean) {
    const auto normed = modulated_norm(x, {changes[4] + 1, changes[3]}, clean, eps_, NormKind::kRmsNorm);
    return gated_sum(x, parts.ff->forward(normed), changes[5], clean);
  };
  VideoAndSound states{.video = attend(video_, hidden.video, of_video, pass.video, pass.rows), .sound = {}};
  if (hidden.sound.defined()) {
    const auto of_sound = with_table(sound_.table, pass.sound.changes, 0, 6);
    states.sound = attend(sound_, hidden.sound, of_sound, pass.sound, {});
    states = attend_across(states, pass);
    states.sound = through_mlp(sound_, states.sound, of_sound, {});
  }
  states.video = through_mlp(video_, states.video, of_video, pass.rows.clean);
  return states;
}

void Ltx2Block::init_own_weights(const WeightInit& init) {
  for (const auto& table : {video_.table, sound_.table, video_.cross_table, sound_.cross_table})
    table.normal_(0, 1 / std::sqrt(static_cast<double>(table.size(1))), init.generator);
}

}  // namespace megashard
