#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "framework/modules/keeps_keys.h"
#include "models/decoder/decoder_layer.h"
#include "models/decoder/prediction_layer.h"
#include "models/layers/layer_inputs.h"
#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "models/moe/expert_parallel.h"
#include "models/network/encoder.h"
#include "models/network/network.h"

namespace megashard {

/// Output of a stack: normed hidden states, and those of its prediction layers.
struct StackOutput {
  LayerOutput layers;
  std::vector<at::Tensor> predicted{};  ///< [B, T, C] each; empty: nothing is predicted in this pass

  template <class F>
  void visit_tensors(F&& f) {
    layers.visit_tensors(f);
    for (auto& states : predicted) f(states);
  }
};

/// Maps token ids to normed hidden states: embed_tokens (and embed_positions), layers, norm, mtp_layers, rotary_emb
/// (and rotary_emb_local, for sliding layers).
class DecoderStack : public torch::nn::Module {
 public:
  DecoderStack(const Network& network, const BuildContext& context);

  /// tokens, position_ids and masks of a Batch, and later tokens (add_later_tokens) for the prediction layers.
  StackOutput forward(const Batch& input, const InjectedEmbeddings& injected);
  std::string class_name() const { return class_name_; }
  const std::shared_ptr<Hooked<Embedding>>& embed_tokens() const { return embed_tokens_; }
  /// Forwards from now on keep keys and values in it and continue from them; null: they do not.
  void set_cache(std::shared_ptr<KeyCache> cache) { cache_ = std::move(cache); }

 private:
  at::Tensor embed(const at::Tensor& tokens, const at::Tensor& positions, const InjectedEmbeddings& injected);
  Pass pass_of(const Batch& input, const at::Tensor& hidden, const at::Tensor& positions);
  /// Tables for `positions`, those of this rank's rows.
  RotaryTables rotate(Hooked<RotaryEmbedding>& rotary, const Batch& input, const at::Tensor& hidden,
                      const at::Tensor& positions) const;

  std::string class_name_;
  TensorParallelRanksPtr ranks_;
  double dropout_;
  double embedding_scale_;
  int64_t attention_chunk_;
  std::optional<QueryTemperature> temperature_;
  std::shared_ptr<Hooked<Embedding>> embed_tokens_, embed_positions_;
  std::vector<std::shared_ptr<Hooked<DecoderLayer>>> layers_;
  std::vector<std::shared_ptr<Hooked<PredictionLayer>>> prediction_layers_;
  std::shared_ptr<Hooked<Norm>> norm_;
  std::optional<LayerInputs> layer_inputs_;
  std::vector<std::shared_ptr<Hooked<RotaryEmbedding>>> rotaries_;
  std::shared_ptr<KeyCache> cache_;  // null: none
};

/// `model` of a network with an encoder: the encoder, and the decoder `language_model`, in which its features take the
/// places of their tokens.
class EncodedStack : public torch::nn::Module {
 public:
  EncodedStack(const Network& network, const BuildContext& context);

  StackOutput forward(const Batch& input);
  std::string class_name() const { return class_name_; }
  const std::shared_ptr<Encoder>& encoder() const { return encoder_; }
  const std::shared_ptr<Hooked<DecoderStack>>& language_model() const { return language_model_; }

 private:
  std::string class_name_;
  std::shared_ptr<Encoder> encoder_;
  std::shared_ptr<Hooked<DecoderStack>> language_model_;
};

/// A causal language model: `model` (a DecoderStack, or with an encoder an EncodedStack) and `lm_head`, which share one
/// tensor if the configuration ties them; or `model` and `score`, for a reward or value model. Parameters start without
/// values: load_hf_weights(), a checkpoint or init_weights() gives them.
class DecoderModel : public ExpertParallelModule, public KeepsKeys {
 public:
  explicit DecoderModel(Network network, BuildContext context = {}, WeightFiles weight_files = {});

  ModelOutput forward(Batch input) override;
  /// The encoder's, and in training later tokens for prediction layers. Of a sequence on several ranks, every rank
  /// passes all tokens and items.
  void prepare(Batch& input) const override;
  std::string class_name() const override { return network_.config.names.model; }
  int64_t vocab_size() const override { return network_.config.vocab_size; }
  std::string why_no_keys() const override;
  bool turns_by_length() const override;
  void keep_keys(int64_t capacity) override;
  void drop_keys() override;
  void check_sequence_ranks(int64_t ranks) const override;
  void check_sequence_ring() const override;
  bool keeps_fp32(const std::string& name) const override;
  /// The decoder's; an encoder's depend on the items and are left out.
  double training_flops(int64_t sequences, int64_t sequence_length) const override;
  std::vector<int64_t> qkv_split_shapes(const std::string& name, const std::vector<int64_t>& sizes) const override;
  WeightMap weight_map() const override;
  const Network& network() const { return network_; }
  /// True for a tensor of a layer of multi-token prediction in the files (WeightFiles).
  bool is_of_prediction_layer(const std::string& stored) const;
  /// True for keys and values of their own that files have for a layer that takes those of another.
  bool is_of_taken_keys(const std::string& stored) const;

 protected:
  void _init_tp_model() override;
  const MoeConfig& moe_config() const override { return network_.config.moe; }
  const BuildContext& context() const override { return context_; }
  std::vector<std::string> default_modules_to_wrap() const override;
  std::vector<std::string> patterns_of_part(const std::string& part) const override;
  OtherPaths other_paths() const override;
  std::optional<bool> cast_forward_inputs(const NamedModule& each) const override;

 private:
  /// Values of a score head; else the tokens' losses for a batch with labels; else logits, whole on all tensor-parallel
  /// ranks.
  ModelOutput head_output(const at::Tensor& states, const Batch& input);  // [B, T, C]
  at::Tensor head_input(const at::Tensor& states) const;
  TokenLosses token_losses(const at::Tensor& states, const at::Tensor& labels, const at::Tensor& weights);
  /// The loss of each prediction layer (--mtp-loss-scaling-factor).
  std::vector<AuxTerm> prediction_terms(const std::vector<at::Tensor>& predicted, const Batch& input);
  std::string text_path() const;                    // path of the decoder, with its dot
  std::vector<EncoderTower> towers() const;         // those of the encoder; empty without one
  std::vector<std::string> encoder_layers() const;  // patterns of the towers' layers

  Network network_;
  BuildContext context_;
  WeightFiles weight_files_;
  std::shared_ptr<Hooked<DecoderStack>> text_;
  std::shared_ptr<Hooked<EncodedStack>> encoded_;  // null: no encoder
  std::shared_ptr<Hooked<Head>> lm_head_;          // null: the head is score_
  std::shared_ptr<Hooked<ScoreHead>> score_;       // null: the head is lm_head_
};

}  // namespace megashard
