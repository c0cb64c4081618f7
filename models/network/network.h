#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "models/config/decoder_config.h"
#include "models/layers/mlp.h"
#include "models/layers/norm.h"
#include "models/layers/part.h"
#include "models/moe/moe.h"
#include "models/network/encoder.h"

namespace megashard {

/// x + scale * after(part(before(x))), with the layer's scale.
struct Branch {
  std::string name;  ///< of the part among the layer's modules
  PartSpecPtr part;
  std::optional<NamedNorm> before{};
  std::optional<NamedNorm> after{};
  bool parallel = false;  ///< takes the input of the branch before it
};

/// Residual branches, one after the other.
struct LayerSpec {
  std::string class_name{};  ///< for wrap policies
  std::vector<Branch> branches;
  double dropout = 0;  ///< of each branch's output
  double scale = 1;    ///< factor of each branch's output
  /// Renames modules in files. weight_map takes the first layer's for all layers.
  std::vector<WeightRenaming> renamings{};
  bool scalar = false;  ///< multiplies the layer's output by its buffer layer_scalar [1]
};

/// A language model as a value: a decoder, and maybe an encoder of its items, without ranks, flags and files.
struct Network {
  DecoderConfig config{};                ///< sizes and switches of the whole network, in the terms of Megatron's flags
  std::vector<RotaryConfig> rotaries{};  ///< turn layers without a window, and with one
  std::vector<LayerSpec> layers{};
  std::vector<LayerSpec> prediction_layers{};  ///< of the last layer's kind (PredictionLayer)
  NormSpec norm{};                             ///< after the last layer
  EncoderSpecPtr encoder{};                    ///< null: text only
};

/// Describes layer `index` of a network.
using DescribeLayer = std::function<LayerSpec(const DecoderConfig& config, int64_t index)>;

/// Attention, then an MLP or experts, each after a norm, with sandwich norms also before one, with post norms only
/// before one. Named as in transformers' Llama: input_layernorm, self_attn, post_attention_layernorm, mlp; in Gemma's
/// sandwich post_attention_layernorm is the norm after attention, and pre_feedforward_layernorm and
/// post_feedforward_layernorm enclose the MLP; of these OLMo 2 has the norms after attention and after the MLP.
LayerSpec decoder_layer(const DecoderConfig& config, int64_t index);

/// The network of a configuration.
Network decoder_network(DecoderConfig config, const DescribeLayer& layer = decoder_layer);

// Pieces of decoder_layer() for families that replace one of them.
NormSpec hidden_norm(const DecoderConfig& config);
PartSpecPtr attention_of(const DecoderConfig& config, int64_t index);
PartSpecPtr mlp_or_experts_of(const DecoderConfig& config, int64_t index);
MlpSpec mlp_of(const DecoderConfig& config, int64_t intermediate_size);
/// `router`: null: the configuration's (top_k_router).
MoeSpec moe_of(const DecoderConfig& config, RouterSpecPtr router = nullptr);
PartSpecPtr experts_of(const DecoderConfig& config, RouterSpecPtr router = nullptr);

/// Visits the parts of all layers, and of those that predict.
void for_each_part(const Network& network, const std::function<void(const PartSpec&)>& visit);

// `stack`: path of the module with the layers (DecoderStack), with its dot: "model.".

/// True for a parameter or buffer that a part keeps in fp32.
bool keeps_fp32(const Network& network, const std::string& stack, const std::string& name);

/// How files have the layers' weights.
WeightMap weight_map(const Network& network, const std::string& stack, const WeightFiles& files);

/// Floating-point operations of forward and backward of `sequences` sequences, as Megatron counts them: recompute is
/// not counted, and attention's scores only where the mask and the window allow them.
double training_flops(const Network& network, int64_t sequences, int64_t sequence_length);

/// Patterns of the modules that Megatron calls `part` (FSDP2Mixin::patterns_of_part).
std::vector<std::string> patterns_of_part(const Network& network, const std::string& stack, const std::string& part);

}  // namespace megashard
