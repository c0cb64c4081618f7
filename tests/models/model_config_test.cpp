#include "models/model_config.h"
#include "models/network_arguments.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include "framework/arguments/argument_table.h"
#include "framework/diagnostics.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Optional;
using testing::StartsWith;
using testing::ThrowsMessage;

/// A directory with a small config.json. The test gives its last fields.
class HfFolder {
 public:
  explicit HfFolder(const std::string& model_type, const std::string& fields) {
    path_ = std::filesystem::path(testing::TempDir()) / ("megashard_" + model_type + std::to_string(++count));
    std::filesystem::create_directories(path_);
    std::ofstream(path_ / "config.json") << R"({"model_type": ")" << model_type
                                         << R"(", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 1000,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
            "max_position_embeddings": 4096, "tie_word_embeddings": true )"
                                         << fields << "}";
  }
  ~HfFolder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }
  DecoderConfig config() const { return decoder_config_from_hf(HfConfig::of_model(path_)); }

 private:
  static inline int count = 0;
  std::filesystem::path path_;
};

TEST(HfConfig, FamiliesDiffer) {
  const auto llama =
      HfFolder("llama", R"(, "attention_bias": true, "initializer_range": 0.04, "pad_token_id": 2)").config();
  EXPECT_EQ(llama.names.layer, "LlamaDecoderLayer");
  EXPECT_TRUE(llama.qkv_bias && llama.attention_out_bias && llama.tie_word_embeddings && !llama.qk_norm);
  EXPECT_EQ(llama.head_dim, 16);
  EXPECT_EQ(llama.init_std, 0.04);
  EXPECT_THAT(llama.pad_token_id, Optional(2));
  const auto qwen2 = HfFolder("qwen2", "").config();
  EXPECT_TRUE(qwen2.qkv_bias && !qwen2.attention_out_bias && !qwen2.mlp_bias);
  const auto qwen3 = HfFolder("qwen3", R"(, "head_dim": null)").config();
  EXPECT_TRUE(qwen3.qk_norm && !qwen3.qkv_bias);
  EXPECT_EQ(qwen3.head_dim, 128);
}

TEST(HfConfig, BothSpellingsOfRope) {
  const auto old =
      HfFolder("llama", R"(, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0})").config();
  EXPECT_EQ(old.rotary.theta, 5e5);
  EXPECT_EQ(old.rotary.kind, RotaryConfig::Kind::kLinear);
  const auto now = HfFolder("llama",
                            R"(, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8,
      "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024})")
                       .config();
  EXPECT_EQ(now.rotary.theta, 5e5);
  EXPECT_EQ(now.rotary.kind, RotaryConfig::Kind::kLlama3);
  EXPECT_EQ(now.rotary.factor, 8);
  EXPECT_EQ(now.rotary.original_max_positions, 1024);
}

TEST(HfConfig, TwoPlacesOfOneKeyMustAgree) {
  const auto refused = [](const char* type, const std::string& fields, const char* message) {
    EXPECT_THAT([&] { HfFolder(type, fields).config(); }, ThrowsMessage<c10::Error>(HasSubstr(message)));
  };
  const std::string linear = R"({"rope_type": "linear", "factor": 2.0, "rope_theta": 500})";
  const std::string by_layer = R"(, "rope_parameters": {"full_attention": )" + linear + "}";
  const auto twice =
      HfFolder("llama", R"(, "rope_theta": 500.0, "rope_scaling": )" + linear + R"(, "rope_parameters": )" + linear)
          .config();
  EXPECT_EQ(twice.rotary.kind, RotaryConfig::Kind::kLinear);
  EXPECT_EQ(twice.rotary.theta, 500);
  refused("llama", R"(, "rope_parameters": {"rope_theta": 500}, "rope_scaling": {"rope_type": "default"})",
          "they say rope_theta 500 and 10000.0");
  refused("llama", R"(, "rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 2})",
          R"(rope_scaling says rope_type "linear" and type "llama3")");
  refused("llama", R"(, "original_max_position_embeddings": 8, "rope_scaling": {"rope_type": "yarn", "factor": 2,
                        "original_max_position_embeddings": 16})",
          "original_max_position_embeddings says 8 and rope_scaling.original_max_position_embeddings says 16");
  refused("gemma3_text", by_layer + R"(, "rope_scaling": {"rope_type": "linear", "factor": 8.0})",
          "rope_parameters.full_attention and rope_scaling describe the same positions, and not alike: they say factor "
          "2.0 and 8.0");
  refused("gemma3_text", by_layer + R"(, "rope_theta": 700)", "rope_theta says 700 and rope_parameters.full_attention");
  refused("gemma3_text", R"(, "rope_parameters": {"sliding_attention": {"rope_theta": 7}}, "rope_local_base_freq": 8)",
          "rope_local_base_freq says 8 and rope_parameters.sliding_attention.rope_theta says 7");
  refused("gemma3_text", R"(, "rope_parameters": )" + linear, "has objects full_attention and sliding_attention");
  refused("qwen3", by_layer, "rope_parameters has an object full_attention");
  const std::string text = R"(, "text_config": {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 1000,
      "num_hidden_layers": 4, "num_attention_heads": 4, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]})";
  refused("qwen2_5_vl", text + R"(, "num_key_value_heads": 4})",
          "num_key_value_heads says 2 and text_config.num_key_value_heads says 4");
  refused(
      "qwen2_5_vl",
      text +
          R"(, "num_key_value_heads": 2}, "rope_scaling": {"type": "yarn", "factor": 4.0, "mrope_section": [4, 2, 2]})",
      "describes other positions than text_config does");
}

TEST(HfConfig, WhatIsNotComputedIsRefused) {
  const auto refused = [](const char* type, const char* fields, const char* message) {
    EXPECT_THAT([&] { HfFolder(type, fields).config(); }, ThrowsMessage<c10::Error>(HasSubstr(message)));
  };
  refused("mamba", "", "model_type mamba is not supported; known are: cohere2, deepseek_v2, deepseek_v3, ernie4_5");
  refused("llama", R"(, "rope_scaling": {"rope_type": "su", "factor": 2})", "rope_type su is not supported");
  refused("llama", R"(, "hidden_act": "mish")", "hidden_act mish is not supported");
  refused("llama", R"(, "head_dim": "four")", "head_dim has an unexpected type");
  refused("llama", R"(, "quantization_config": {"quant_method": "gptq"})",
          "the weights are quantised, which cannot be trained here");
  refused("llama", R"(, "model_type": "qwen2")", "has the key \"model_type\" twice");
  refused("mistral", R"(, "sliding_window": 0)", "sliding_window 0 must be positive, or null for full attention");
  refused("gemma3_text", R"(, "final_logit_softcapping": 30.0)", "final_logit_softcapping is not supported");
  refused("gemma3_text", R"(, "use_bidirectional_attention": true)", "use_bidirectional_attention is not supported");
  refused("gemma3_text", R"(, "layer_types": ["full_attention"])", "layer_types has 1 entries for num_hidden_layers 4");
  refused("gemma3_text", R"(, "layer_types": ["a", "a", "a", "a"])", "layer_types has a, which is not supported");
  EXPECT_THAT([] { HfConfig::of_model("/nonexistent"); },
              ThrowsMessage<c10::Error>(HasSubstr("cannot read /nonexistent/config.json")));
}

TEST(HfConfig, WindowsOfEachFamily) {
  const auto windows = [](const char* type, const char* fields) {
    const auto config = HfFolder(type, fields).config();
    return std::pair(config.sliding_window, config.sliding_layers);
  };
  using Windows = std::pair<int64_t, std::vector<int64_t>>;
  const auto all = std::vector<int64_t>{0, 1, 2, 3};
  EXPECT_EQ(windows("llama", R"(, "sliding_window": 7)"), Windows(0, {}));
  EXPECT_EQ(windows("mistral", R"(, "sliding_window": 7)"), Windows(7, all));
  EXPECT_EQ(windows("mistral", ""), Windows(4096, all));
  EXPECT_EQ(windows("mistral", R"(, "sliding_window": null)").first, 0);
  EXPECT_EQ(windows("qwen2", R"(, "sliding_window": 7, "max_window_layers": 1)"), Windows(0, {}));
  const std::string used = R"(, "use_sliding_window": true, "sliding_window": 7)";
  EXPECT_EQ(windows("qwen2", (used + R"(, "max_window_layers": 3)").c_str()), Windows(7, {3}));
  EXPECT_EQ(windows("qwen3_moe", used.c_str()), Windows(7, all));
  const char* types = R"(, "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"])";
  EXPECT_EQ(windows("qwen3", (used + types).c_str()), Windows(7, {1}));
  EXPECT_EQ(windows("gemma3_text", types), Windows(4096, {1}));
  EXPECT_EQ(windows("gemma3_text", R"(, "sliding_window": 7, "sliding_window_pattern": 3)"), Windows(7, {0, 1, 3}));
}

TEST(HfConfig, Gemma3) {
  const auto config =
      HfFolder("gemma3_text", R"(, "query_pre_attn_scalar": 64, "rope_local_base_freq": 300, "rope_theta": 4e5,
                                 "rope_scaling": {"rope_type": "linear", "factor": 8.0})")
          .config();
  EXPECT_TRUE(config.zero_centered_norm && config.sandwich_norms && config.qk_norm && config.tie_word_embeddings);
  EXPECT_EQ(config.activation, Activation::kGeluTanh);
  EXPECT_THAT(config.attention_scale, Optional(0.125));
  EXPECT_EQ(config.embedding_scale, 8);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.rotary.theta, 4e5);
  EXPECT_EQ(config.rotary.kind, RotaryConfig::Kind::kLinear);
  ASSERT_TRUE(config.sliding_rotary);
  EXPECT_EQ(config.sliding_rotary->theta, 300);
  EXPECT_EQ(config.sliding_rotary->kind, RotaryConfig::Kind::kDefault);
  EXPECT_THAT(config.pad_token_id, Optional(0));  // Gemma3TextConfig's default
}

Arguments with_flags(const std::filesystem::path& hf_model,
                     const std::vector<std::pair<const char*, std::vector<std::string>>>& flags) {
  Arguments arguments;
  arguments.hf_model = hf_model.string();
  for (const auto& [flag, words] : flags) set_option(*find_option(flag), words, arguments);
  return arguments;
}

TEST(Contradiction, NamesFlagAndFile) {
  const HfFolder folder("llama", R"(, "rope_theta": 10000)");
  const auto say = [&](const char* flag, const std::vector<std::string>& words) {
    return contradictions(folder.config(), with_flags(folder.path(), {{flag, words}}));
  };
  EXPECT_THAT(say("--num-layers", {"5"}),
              ElementsAre(HasSubstr("--num-layers 5 contradicts the model's config.json, which says 4")));
  EXPECT_THAT(say("--normalization", {"LayerNorm"}), ElementsAre(HasSubstr("which says RMSNorm")));
  EXPECT_THAT(say("--qk-layernorm", {}),
              ElementsAre(HasSubstr("--qk-layernorm (qk_layernorm = True) contradicts the model's "
                                    "config.json, which says False")));
  EXPECT_THAT(say("--apply-layernorm-1p", {}), ElementsAre(HasSubstr("config.json, which says False")));
  const HfFolder gemma("gemma3_text", "");
  EXPECT_THAT(contradictions(gemma.config(), with_flags(gemma.path(), {{"--apply-layernorm-1p", {}}})), IsEmpty());
  EXPECT_THAT(say("--disable-bias-linear", {}), IsEmpty());
  EXPECT_THAT(say("--disable-bias-linear", {"false"}), ElementsAre(HasSubstr("which says False")));
  EXPECT_THAT(say("--rotary-base", {"10000"}), IsEmpty());
  EXPECT_THAT(say("--norm-epsilon", {"1e-5"}), IsEmpty());
  EXPECT_THAT(say("--untie-embeddings-and-output-weights", {}), IsEmpty());
  EXPECT_THAT(say("--lr", {"0.1"}), IsEmpty());
}

TEST(Contradiction, AllAreTold) {
  const HfFolder folder("llama", "");
  auto arguments = with_flags(folder.path(), {{"--num-layers", {"5"}}, {"--add-qkv-bias", {}}});
  EXPECT_THAT([&] { decoder_config(arguments); },
              ThrowsMessage<UsageError>(AllOf(StartsWith("2 things must change:\n  --add-qkv-bias"),
                                              HasSubstr("\n  --num-layers 5 contradicts"))));
}

TEST(Contradiction, NullTokenizerAddsTheEndOfDocuments) {
  const HfFolder folder("llama", "");  // vocabulary of 1000
  const auto say = [&](const char* tokenizer, const char* size) {
    return contradictions(folder.config(),
                          with_flags(folder.path(), {{"--tokenizer-type", {tokenizer}}, {"--vocab-size", {size}}}));
  };
  EXPECT_THAT(say("NullTokenizer", "999"), IsEmpty());
  EXPECT_THAT(say("NullTokenizer", "1000"), IsEmpty());
  EXPECT_THAT(say("NullTokenizer", "998"), ElementsAre(HasSubstr("which says 1000")));
  EXPECT_THAT(say("HuggingFaceTokenizer", "999"), ElementsAre(HasSubstr("which says 1000")));
}

TEST(HfModel, SequencesBeyondItsPositionsAreWarnedOf) {
  const auto warnings = [](const std::string& fields, const char* length) {
    std::vector<std::string> said;
    const HfFolder folder("llama", fields);
    auto arguments = with_flags(folder.path(), {{"--seq-length", {length}}});
    take_network_from_hf_model(arguments, [&](Severity, const std::string& text) { said.push_back(text); });
    return said;
  };
  using testing::ElementsAre;
  using testing::IsEmpty;
  EXPECT_THAT(warnings("", "4096"), IsEmpty());
  EXPECT_THAT(warnings("", "8193"),
              ElementsAre(testing::AllOf(HasSubstr("--seq-length 8193 is more than the 4096 positions"),
                                         HasSubstr(R"("rope_type": "linear", "factor": 3.0 in the rope_parameters)"))));
  const std::string linear = R"(, "rope_scaling": {"rope_type": "linear", "factor": 2.0})";
  EXPECT_THAT(warnings(linear, "8192"), IsEmpty());
  EXPECT_THAT(warnings(linear, "8193"), ElementsAre(HasSubstr("multiply the factor")));
}

TEST(HfModel, ArgumentsShowItsNetwork) {
  const HfFolder folder("qwen2", R"(, "rope_theta": 1e6, "initializer_range": 0.03)");
  auto arguments = with_flags(folder.path(), {{"--untie-embeddings-and-output-weights", {}}});
  std::vector<std::string> said;
  take_network_from_hf_model(arguments, [&](Severity, const std::string& text) { said.push_back(text); });
  EXPECT_EQ(arguments.num_layers, 4);
  EXPECT_EQ(arguments.hidden_size, 64);
  EXPECT_EQ(arguments.ffn_hidden_size, 96);
  EXPECT_EQ(arguments.num_query_groups, 2);
  EXPECT_TRUE(arguments.group_query_attention && arguments.swiglu && arguments.add_qkv_bias);
  EXPECT_FALSE(arguments.add_bias_linear);
  EXPECT_EQ(arguments.padded_vocab_size, 1000);
  EXPECT_EQ(arguments.vocab_size, std::nullopt);
  EXPECT_EQ(arguments.rotary_base, 1000000);
  EXPECT_EQ(arguments.normalization, Normalization::kRmsNorm);
  EXPECT_EQ(arguments.norm_epsilon, 1e-5);
  EXPECT_EQ(arguments.hidden_dropout, 0);
  EXPECT_EQ(arguments.init_method_std, 0.03);
  EXPECT_FALSE(arguments.untie_embeddings_and_output_weights);  // config.json beats the flag of Megatron's launch lines
  EXPECT_TRUE(decoder_config(arguments).tie_word_embeddings);
  EXPECT_THAT(said, ElementsAre(HasSubstr("--untie-embeddings-and-output-weights is not used")));

  auto tied = with_flags(folder.path(), {{"--init-method-std", {"0.5"}}});
  take_network_from_hf_model(tied, [](auto, const auto&) {});
  EXPECT_FALSE(tied.untie_embeddings_and_output_weights);
  EXPECT_EQ(tied.init_method_std, 0.5);
  const DecoderConfig built = decoder_config(tied);  // built from the parsed arguments: the same model
  EXPECT_TRUE(built.tie_word_embeddings);
  EXPECT_EQ(built.init_std, 0.5);
}

TEST(DecoderConfig, MegatronsDefaults) {
  Arguments arguments;
  arguments.num_layers = 2;
  arguments.hidden_size = 768;
  arguments.num_attention_heads = 12;
  arguments.max_position_embeddings = 128;
  arguments.padded_vocab_size = 256;
  const auto plain = decoder_config_from_flags(arguments);
  EXPECT_EQ(plain.intermediate_size, 3072);
  EXPECT_EQ(plain.activation, Activation::kGeluTanh) << "Megatron's kernel for GELU with a bias";
  EXPECT_EQ(plain.norm, NormKind::kLayerNorm);
  EXPECT_EQ(plain.positions, PositionKind::kLearned);
  EXPECT_TRUE(plain.qkv_bias && plain.attention_out_bias && plain.mlp_bias && plain.tie_word_embeddings);
  EXPECT_EQ(plain.num_kv_heads, 12);
  EXPECT_EQ(plain.hidden_dropout, 0.1);
  EXPECT_DOUBLE_EQ(plain.output_init_scale, 0.5);
  arguments.swiglu = true;
  arguments.add_bias_linear = false;
  EXPECT_EQ(decoder_config_from_flags(arguments).intermediate_size, 2048);
  EXPECT_FALSE(decoder_config_from_flags(arguments).qkv_bias);
  arguments.num_attention_heads = 7;
  EXPECT_THAT([&] { decoder_config_from_flags(arguments); },
              ThrowsMessage<UsageError>(HasSubstr("--hidden-size 768 is not divisible by --num-attention-heads 7")));
  arguments.hidden_size = std::nullopt;
  EXPECT_THAT([&] { decoder_config_from_flags(arguments); },
              ThrowsMessage<UsageError>(HasSubstr("--hidden-size is missing")));
}

}  // namespace
}  // namespace megashard
