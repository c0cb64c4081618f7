#include "models/hugging_face/save_hf_model.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/hugging_face/hf_assets.h"
#include "checkpoint/hugging_face/save_hf_sharded.h"
#include "checkpoint/steps/folder_content.h"
#include "framework/diagnostics.h"
#include "framework/training/checkpoint_saver.h"
#include "framework/training/save_contract.h"
#include "models/hugging_face/save_adapters.h"
#include "models/hugging_face/weight_names.h"
#include "models/layers/lora.h"
#include "models/model_config.h"
#include "models/moe/stacked_experts.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// The family of transformers that computes the network; empty: none of the three does.
std::string family_that_computes(const DecoderConfig& config) {
  const bool known = config.norm == NormKind::kRmsNorm && config.gated_mlp &&
                     config.positions == PositionKind::kRotary && config.rotary.fraction == 1;
  if (!known) return "";
  const bool alike = config.qkv_bias == config.attention_out_bias;
  if (config.qk_norm) return alike && !config.mlp_bias ? "Qwen3" : "";
  if (alike) return config.hidden_size % config.num_heads == 0 ? "Llama" : "";
  return config.qkv_bias && !config.mlp_bias ? "Qwen2" : "";
}

OrderedJson rope_scaling(const RotaryConfig& rotary) {
  if (rotary.kind == RotaryConfig::Kind::kDefault) return nullptr;
  OrderedJson scaling;
  scaling["rope_type"] = rotary.kind == RotaryConfig::Kind::kLinear ? "linear" : "llama3";
  scaling["factor"] = rotary.factor;
  if (rotary.kind == RotaryConfig::Kind::kLinear) return scaling;
  scaling["low_freq_factor"] = rotary.low_freq_factor;
  scaling["high_freq_factor"] = rotary.high_freq_factor;
  scaling["original_max_position_embeddings"] = std::llround(rotary.original_max_positions);
  return scaling;
}

OrderedJson config_of_network(const DecoderConfig& network) {
  const auto family = family_that_computes(network);
  if (family.empty()) {
    throw UsageError("--save-hf: transformers' Llama, Qwen2 and Qwen3 do not compute the network of these "
                     "flags; they need --normalization RMSNorm, --swiglu, --position-embedding-type rope, whole "
                     "--rotary-percent, and with --qk-layernorm or --add-qkv-bias also --disable-bias-linear. "
                     "Leave --save-hf out, or change the network");
  }
  auto model_type = family;
  std::transform(model_type.begin(), model_type.end(), model_type.begin(),
                 [](unsigned char letter) { return std::tolower(letter); });
  OrderedJson config;
  config["architectures"] = {family + "ForCausalLM"};
  config["model_type"] = model_type;
  config["vocab_size"] = network.vocab_size;
  config["hidden_size"] = network.hidden_size;
  config["intermediate_size"] = network.intermediate_size;
  config["num_hidden_layers"] = network.num_layers;
  config["num_attention_heads"] = network.num_heads;
  config["num_key_value_heads"] = network.num_kv_heads;
  config["head_dim"] = network.head_dim;
  config["max_position_embeddings"] = network.max_positions;
  config["hidden_act"] = "silu";
  config["rms_norm_eps"] = network.norm_eps;
  config["rope_theta"] = network.rotary.theta;
  config["rope_scaling"] = rope_scaling(network.rotary);
  if (family != "Qwen2") config["attention_bias"] = network.qkv_bias;
  if (family == "Llama") config["mlp_bias"] = network.mlp_bias;
  config["attention_dropout"] = network.attention_dropout;
  config["initializer_range"] = network.init_std;
  config["bos_token_id"] = nullptr;  // the text's, which training does not know
  config["eos_token_id"] = nullptr;
  return config;
}

OrderedJson config_of_run(const Arguments& arguments) {
  const auto network = decoder_config(arguments);
  auto config = arguments.hf_model ? need_hf_config(*arguments.hf_model) : config_of_network(network);
  config["tie_word_embeddings"] = network.tie_word_embeddings;
  const bool new_name = config.contains("dtype");  // transformers 5 reads both
  config[new_name ? "dtype" : "torch_dtype"] = arguments.bf16 ? "bfloat16" : "float32";
  return config;
}

}  // namespace

void prepare_hf_model(const Arguments& arguments, const ProcessGroupPtr& group) {
  config_of_run(arguments);
  const auto& folder = *arguments.save_hf;
  const auto real = [](const std::string& path) { return std::filesystem::weakly_canonical(path); };
  if (arguments.hf_model && real(folder) == real(*arguments.hf_model)) {
    throw UsageError("--save-hf " + folder +
                     " is --hf-model's directory, whose weights it would replace; give another");
  }
  const auto refusals = gather_or_throw(
      group, [&] { return rank_in(group) == 0 ? content_refusal(folder, "--save-hf", arguments.overwrite) : ""; });
  if (!refusals[0].empty()) throw UsageError(refusals[0]);
}

void save_hf_model(MegatronModule& model, const Arguments& arguments, const ProcessGroupPtr& group) {
  const auto& folder = *arguments.save_hf;
  auto tensors = model.keeps_trained_only() ? merged_state_dict(model) : checked_state_dict(model);
  bool transposes = false;
  if (const auto* published = dynamic_cast<const PublishedNames*>(&model)) {
    for (auto& [name, tensor] : tensors) name = published->published_name(name);
    transposes = published->stacks_experts();
  }
  if (transposes || arguments.save_hf_stacked_experts) {
    const auto network = decoder_config(arguments);
    const auto& moe = network.moe;
    transposes = transposes && stacks_transposed(network.hidden_size, moe.intermediate_size);
    tensors = transposes ? stack_experts_transposed(tensors, moe.num_experts) : stack_experts(tensors, moe.num_experts);
  }
  const auto write_beside = [&](const std::string& beside) {
    if (arguments.hf_model) copy_hf_assets(*arguments.hf_model, beside);
    write_hf_config(beside, config_of_run(arguments));
  };
  const auto ranks = make_saving_group(group, "Hugging Face saves");
  save_hf_sharded(folder, tensors, ranks, {.beside = write_beside});
  if (model.keeps_trained_only()) save_adapters(model, arguments, folder + "/adapter", ranks);
}

}  // namespace megashard
