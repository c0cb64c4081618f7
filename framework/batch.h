#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// What a model computes on the host from a batch; models derive theirs. Hooks pass it on and see none of its tensors.
struct InputPlan {
  virtual ~InputPlan() = default;
};

/// What an entry of a column belongs to.
enum class Axis {
  kToken,  ///< [..., B, T], an entry per token: padded with zeros along T, cut over the ranks that share a sequence
  kRow,    ///< [B, ...], an entry per sample
  kItem,   ///< [N, ...]: N items (pictures, patches) of all samples, in the order of the samples
};

struct Column {
  at::Tensor data;
  Axis axis = Axis::kToken;
  bool is_input = true;  ///< an input of the model, which FSDP's hooks see and cast; false: for the loss alone
};

/// The columns that models and the trainer know by name. In every mask true, or 1, marks what counts (transformers'
/// attention_mask, Megatron's loss_mask).
inline constexpr const char* kTokens = "tokens";  ///< [B, T] int64
/// [B, T] int64, or [3, B, T] with M-RoPE or patches of latents (frame, row, column)
inline constexpr const char* kPositionIds = "position_ids";
inline constexpr const char* kLabels = "labels";                   ///< [B, T] int64
inline constexpr const char* kLossMask = "loss_mask";              ///< [B, T] float32, 0 or 1: tokens whose loss counts
inline constexpr const char* kTokenMask = "token_mask";            ///< [B, T] bool: false for padding
inline constexpr const char* kLogitTemperatures = "temperatures";  ///< [B, T] float32: divide a position's logits
inline constexpr const char* kLossWeights = "loss_weights";        ///< [B, T] float32: ModelOutput::weighted_loss
/// [K, B, T] int64: tokens that a teacher found likeliest at the place of each label.
inline constexpr const char* kTeacherTokens = "teacher_topk_ids";

// A model of latents (MultiModalModule::latent_patches) takes patches for tokens. The P values of a patch are in the
// order channel, frame, row, column within it; the patches of a row are in the order frame, row, column.
inline constexpr const char* kLatents = "latents";               ///< [P, B, T] fp32, noisy
inline constexpr const char* kTargets = "targets";               ///< [P, B, T] fp32: what the model is to predict
inline constexpr const char* kConditions = "conditions";         ///< [Q, B, T] fp32: further channels of each patch
inline constexpr const char* kControls = "controls";             ///< [Q, B, T] fp32: what VACE's second stack takes
inline constexpr const char* kTimesteps = "timesteps";           ///< [B] fp32, 0 .. 1000
inline constexpr const char* kTextFeatures = "text_features";    ///< [B, L, D], of the text encoder
inline constexpr const char* kTextMask = "text_mask";            ///< [B, L] bool: false for padding
inline constexpr const char* kImageFeatures = "image_features";  ///< [B, L, D], of the image encoder
inline constexpr const char* kCleanPatches = "clean_patches";    ///< [B, T] bool: given without noise, at timestep 0
inline constexpr const char* kPooledText = "pooled_text";        ///< [B, P], of Flux's second text encoder
inline constexpr const char* kNoise = "noise";                   ///< [P, B, T] fp32: in place of a drawn one
inline constexpr const char* kNoiseSeeds = "noise_seeds";        ///< [B] int64: of a sample's noise and timestep

/// Describes the patches of a model of latents: boxes of frames, rows and columns of all channels.
struct LatentPatches {
  int64_t channels = 0;                                                         ///< number of channels that get noise
  std::array<int64_t, 3> patch{};                                               ///< frames, rows, columns
  int64_t text_width = 0;                                                       ///< width of kTextFeatures
  int64_t values() const { return channels * patch[0] * patch[1] * patch[2]; }  ///< size of a patch
};

/// Names the numbers that a loss takes from the model for each token, besides the token's own loss.
struct Asked {
  bool entropies = false;          ///< ModelOutput::entropies
  bool teacher_log_probs = false;  ///< ModelOutput::teacher_log_probs, of the column kTeacherTokens
};

/// One micro batch, from the data loader to the model: B samples of T tokens in named columns. A data set adds columns
/// of its own (pixel_values, ref_log_probs); all of them are concatenated, moved and cut by their axis.
struct Batch {
  std::map<std::string, Column, std::less<>> columns{};
  /// [documents] int64, in host memory: the lengths of the packed documents, row after row. Attention does not cross
  /// them. Undefined: each row is one document.
  at::Tensor document_lengths{};
  SequenceShard sequence{};  ///< if it is cut: the columns hold this rank's T rows of each sequence
  std::shared_ptr<const InputPlan> plan{};
  bool is_prepared = false;  ///< MultiModalModule::prepare has run
  Asked asked{};

  /// The column's tensor; undefined if there is no such column.
  at::Tensor find(std::string_view name) const;
  /// The column's tensor; throws an error that names it if it is missing.
  const at::Tensor& at(std::string_view name) const;
  /// Adds a column, or replaces its tensor. An undefined tensor adds nothing.
  void set(const std::string& name, at::Tensor data, Axis axis = Axis::kToken, bool is_input = true);
  /// Removes a column. Returns its tensor; undefined if there was none.
  at::Tensor take(std::string_view name);

  /// Sizes of kTokens, of kLatents, or else of kLossMask: the number of samples, and of the tokens (patches) of each.
  int64_t rows() const { return per_token().size(-2); }
  int64_t length() const { return per_token().size(-1); }

  const at::Tensor& tokens() const { return at(kTokens); }
  at::Tensor position_ids() const { return find(kPositionIds); }  ///< undefined: 0, 1, 2, ... in each row
  at::Tensor labels() const { return find(kLabels); }             ///< undefined: the model returns logits
  at::Tensor token_mask() const { return find(kTokenMask); }      ///< undefined: no padding

  /// The inputs of the model.
  template <class F>
  void visit_tensors(F&& f) {
    for (auto& [name, column] : columns) {
      if (column.is_input) f(column.data);
    }
  }

 private:
  const at::Tensor& per_token() const;
};

/// One batch of the samples of all parts; shorter ones are padded, which the token mask then shows. Throws for a column
/// of tokens or rows that only some parts have. `pin_memory`: columns of tokens and rows in page-locked memory.
Batch concatenate(std::vector<Batch> parts, bool pin_memory);
/// Copies all columns to `device`, without blocking the host.
Batch to_device(Batch batch, c10::Device device);
/// This rank's rows of a batch with whole sequences, by Batch::sequence.
Batch rows_of_rank(Batch whole);

/// at::cat along `dim`, in page-locked memory if asked for.
at::Tensor cat_parts(const std::vector<at::Tensor>& parts, int64_t dim, bool pin_memory);

/// A term that a model adds to the loss besides that of the tokens: a router's balance.
struct AuxTerm {
  std::string name;   ///< of its metric: "load_balancing_loss"
  at::Tensor value;   ///< scalar fp32 with its coefficient; its gradient is that of the mean over the tokens
  at::Tensor metric;  ///< scalar without gradient: what the log shows
  /// Scalar: number of tokens that `value` is the mean over, by which --calculate-per-token-loss weighs it; undefined:
  /// that of the loss's terms.
  at::Tensor tokens{};
};

/// Result of a model for a Batch. Undefined tensors are absent.
struct ModelOutput {
  at::Tensor logits{};  ///< [B, T, V]; without labels
  /// [B, T] fp32: -log p(label) with labels; with targets the mean squared error of a patch
  at::Tensor token_losses{};
  at::Tensor predictions{};  ///< [P, B, T] fp32, of a model of latents; without targets
  at::Tensor values{};       ///< fp32: what Needs::values takes, [B, T] of a score head; without other outputs
  at::Tensor entropies{};    ///< [B, T] fp32, of the distributions that the labels are from; if asked for
  at::Tensor teacher_log_probs{};  ///< [K, B, T] fp32: log-probabilities of kTeacherTokens; if asked for
  /// Scalar: the sum of loss_weights * token_losses, where the batch has that column and the model makes the head's
  /// gradients in forward; token_losses have no gradient then. A model need not: the objective's sum has the same one.
  at::Tensor weighted_loss{};
  std::vector<AuxTerm> aux{};

  template <class F>
  void visit_tensors(F&& f) {
    f(logits);
    f(token_losses);
    f(predictions);
    f(values);
    f(entropies);
    f(teacher_log_probs);
    f(weighted_loss);
    for (AuxTerm& term : aux) f(term.value);
  }
};

}  // namespace megashard
