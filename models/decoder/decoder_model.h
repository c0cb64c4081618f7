#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/config/weight_files.h"
#include "models/decoder/decoder_layer.h"
#include "models/moe/expert_parallel.h"

namespace megashard {

/// Features of images for a DecoderStack; undefined: none.
struct VisualInput {
  at::Tensor token_indices;           ///< [N] int64: of the B * T tokens, which the features replace
  at::Tensor features;                ///< [N, C]
  std::vector<at::Tensor> deepstack;  ///< each [N, C]: added there behind layer 0, 1, ...

  template <class F>
  void visit_tensors(F&& f) {
    f(token_indices);
    f(features);
    f(deepstack);
  }
};

/// Token ids to normed hidden states: embed_tokens (and embed_positions), layers, norm, rotary_emb
/// (and rotary_emb_local, of sliding layers). `model` in the names of a DecoderModel's parameters.
class DecoderStack : public torch::nn::Module {
 public:
  explicit DecoderStack(const DecoderConfig& config);

  /// tokens, position_ids and masks of a Batch -> [B, T, C].
  RoutedStates forward(const Batch& input, const VisualInput& visual);
  std::string class_name() const { return class_name_; }
  const std::shared_ptr<Hooked<Embedding>>& embed_tokens() const { return embed_tokens_; }
  std::vector<std::shared_ptr<Hooked<SparseMoeBlock>>> sparse_blocks() const;

 private:
  at::Tensor embed(const at::Tensor& tokens, const at::Tensor& positions, const VisualInput& visual);
  /// Tables of the input's positions, or of `positions`, those of a cut sequence.
  RotaryTables rotate(Hooked<RotaryEmbedding>& rotary, const Batch& input, const at::Tensor& hidden,
                      const at::Tensor& positions) const;

  std::string class_name_;
  TensorParallelRanksPtr ranks_;
  double dropout_;
  double embedding_scale_;
  std::vector<bool> slides_;  // of each layer
  int64_t window_;            // of these that slide
  std::shared_ptr<Hooked<Embedding>> embed_tokens_, embed_positions_;
  std::vector<std::shared_ptr<Hooked<DecoderLayer>>> layers_;
  std::shared_ptr<Hooked<Norm>> norm_;
  std::shared_ptr<Hooked<RotaryEmbedding>> rotary_emb_, rotary_emb_local_;
};

/// The head's output for hidden states [B, T, C]: the tokens' losses for a batch with labels; else logits, whole on all
/// tensor-parallel ranks.
ModelOutput head_output(const DecoderConfig& config, const at::Tensor& states, Hooked<Linear>& head,
                        const Batch& input);
/// Patterns of a decoder's parts by Megatron's names (FSDP2Mixin::patterns_of_part); `list` is the
/// path of its layers.
std::vector<std::string> decoder_patterns_of_part(const DecoderConfig& config, const std::string& list,
                                                  const std::string& part);
/// Where Megatron's modules of a GPT, and of MindSpeed-MM's text_decoder, are (FSDP2Mixin::megatron_paths); `stack` is
/// the path of the decoder with its dot.
OtherPaths decoder_megatron_paths(const std::string& stack);
double decoder_training_flops(const DecoderConfig& config, int64_t sequences, int64_t sequence_length);

/// A causal language model: `model` and `lm_head`, which share one tensor where the configuration
/// ties them. Parameters start without values: load_hf_weights(), a checkpoint or init_weights()
/// gives them.
class DecoderModel : public ExpertParallelModule, public PublishedWeights {
 public:
  explicit DecoderModel(DecoderConfig config);

  ModelOutput forward(Batch input) override;
  std::string class_name() const override { return config_.names.model; }
  int64_t vocab_size() const override { return config_.vocab_size; }
  void check_sequence_ranks(int64_t ranks) const override;
  void check_sequence_ring() const override;
  double training_flops(int64_t sequences, int64_t sequence_length) const override;
  const WeightFiles& weight_files() const override { return config_.weight_files; }
  const DecoderConfig& config() const { return config_; }

 protected:
  void _init_tp_model() override;
  const MoeConfig& moe_config() const override { return config_.moe; }
  std::vector<std::shared_ptr<Hooked<SparseMoeBlock>>> sparse_blocks() const override {
    return model_->sparse_blocks();
  }
  std::vector<std::string> default_modules_to_wrap() const override { return {"model.layers.{*}"}; }
  std::vector<std::string> patterns_of_part(const std::string& part) const override;
  OtherPaths megatron_paths() const override { return decoder_megatron_paths("model."); }

 private:
  DecoderConfig config_;
  std::shared_ptr<Hooked<DecoderStack>> model_;
  std::shared_ptr<Hooked<Linear>> lm_head_;
};

}  // namespace megashard
