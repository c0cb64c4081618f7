#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/decoder/decoder_stack.h"
#include "models/layers/vocabulary.h"
#include "models/moe/expert_parallel.h"

namespace megashard {

/// A causal language model: `model` (a DecoderStack, or with an encoder an EncodedStack) and `lm_head`, which share one
/// tensor if the configuration ties them. Parameters start without values: load_hf_weights(), a checkpoint or
/// init_weights() gives them.
class DecoderModel : public ExpertParallelModule {
 public:
  explicit DecoderModel(Network network, BuildContext context = {}, WeightFiles weight_files = {});

  ModelOutput forward(Batch input) override;
  /// The encoder's. Of a sequence on several ranks, every rank passes all tokens and items.
  void prepare(Batch& input) const override;
  std::string class_name() const override { return network_.config.names.model; }
  int64_t vocab_size() const override { return network_.config.vocab_size; }
  void check_sequence_ranks(int64_t ranks) const override;
  void check_sequence_ring() const override;
  bool keeps_fp32(const std::string& name) const override;
  /// The decoder's; an encoder's depend on the items and are left out.
  double training_flops(int64_t sequences, int64_t sequence_length) const override;
  std::vector<int64_t> qkv_split_shapes(const std::string& name, const std::vector<int64_t>& sizes) const override;
  WeightMap weight_map() const override;
  const Network& network() const { return network_; }

 protected:
  void _init_tp_model() override;
  const MoeConfig& moe_config() const override { return network_.config.moe; }
  const BuildContext& context() const override { return context_; }
  std::vector<std::string> default_modules_to_wrap() const override;
  std::vector<std::string> patterns_of_part(const std::string& part) const override;
  OtherPaths megatron_paths() const override;
  std::optional<bool> cast_forward_inputs(const NamedModule& each) const override;

 private:
  /// The tokens' losses for a batch with labels; else logits, whole on all tensor-parallel ranks.
  ModelOutput head_output(const at::Tensor& states, const Batch& input);  // [B, T, C]
  std::string text_path() const;                                          // of the decoder, with its dot
  std::string encoder_layers() const;  // pattern of the encoder's layers; empty: none
  std::string encoder_path() const;    // of the encoder, with its dot

  Network network_;
  BuildContext context_;
  WeightFiles weight_files_;
  std::shared_ptr<Hooked<DecoderStack>> text_;
  std::shared_ptr<Hooked<EncodedStack>> encoded_;  // null: no encoder
  std::shared_ptr<Hooked<Head>> lm_head_;
};

}  // namespace megashard
