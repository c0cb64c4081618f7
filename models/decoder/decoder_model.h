#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/config/weight_files.h"
#include "models/decoder/decoder_layer.h"
#include "models/layers/linear.h"
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
  DecoderStack(const Network& network, const BuildContext& context);

  /// tokens, position_ids and masks of a Batch -> [B, T, C].
  LayerOutput forward(const Batch& input, const VisualInput& visual);
  std::string class_name() const { return class_name_; }
  const std::shared_ptr<Hooked<Embedding>>& embed_tokens() const { return embed_tokens_; }

 private:
  at::Tensor embed(const at::Tensor& tokens, const at::Tensor& positions, const VisualInput& visual);
  /// Tables of the input's positions, or of `positions`, those of a cut sequence.
  RotaryTables rotate(Hooked<RotaryEmbedding>& rotary, const Batch& input, const at::Tensor& hidden,
                      const at::Tensor& positions) const;

  std::string class_name_;
  TensorParallelRanksPtr ranks_;
  double dropout_;
  double embedding_scale_;
  std::shared_ptr<Hooked<Embedding>> embed_tokens_, embed_positions_;
  std::vector<std::shared_ptr<Hooked<DecoderLayer>>> layers_;
  std::shared_ptr<Hooked<Norm>> norm_;
  std::vector<std::shared_ptr<Hooked<RotaryEmbedding>>> rotaries_;
};

/// The head's output for hidden states [B, T, C]: the tokens' losses for a batch with labels; else logits, whole on all
/// tensor-parallel ranks.
ModelOutput head_output(const BuildContext& context, const at::Tensor& states, Hooked<Linear>& head,
                        const Batch& input);
/// Where Megatron's modules of a GPT, and of MindSpeed-MM's text_decoder, are (FSDP2Mixin::megatron_paths); `stack` is
/// the path of the decoder with its dot.
OtherPaths decoder_megatron_paths(const std::string& stack);

/// A causal language model: `model` and `lm_head`, which share one tensor where the configuration
/// ties them. Parameters start without values: load_hf_weights(), a checkpoint or init_weights()
/// gives them.
class DecoderModel : public ExpertParallelModule, public PublishedWeights {
 public:
  explicit DecoderModel(Network network, BuildContext context = {}, WeightFiles weight_files = {});

  ModelOutput forward(Batch input) override;
  std::string class_name() const override { return network_.config.names.model; }
  int64_t vocab_size() const override { return network_.config.vocab_size; }
  void check_sequence_ranks(int64_t ranks) const override;
  void check_sequence_ring() const override;
  double training_flops(int64_t sequences, int64_t sequence_length) const override;
  const WeightFiles& weight_files() const override { return weight_files_; }
  const Network& network() const { return network_; }

 protected:
  void _init_tp_model() override;
  bool keeps_fp32(const std::string& name) const override;
  const MoeConfig& moe_config() const override { return network_.config.moe; }
  const BuildContext& context() const override { return context_; }
  std::vector<std::string> default_modules_to_wrap() const override { return {"model.layers.{*}"}; }
  std::vector<std::string> patterns_of_part(const std::string& part) const override;
  OtherPaths megatron_paths() const override { return decoder_megatron_paths("model."); }

 private:
  Network network_;
  BuildContext context_;
  WeightFiles weight_files_;
  std::shared_ptr<Hooked<DecoderStack>> model_;
  std::shared_ptr<Hooked<Linear>> lm_head_;
};

}  // namespace megashard
