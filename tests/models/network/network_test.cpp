#include "models/network/network.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "models/moe/moe.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr double kLayers = 4, kHidden = 8, kFfn = 32, kHeads = 4, kGroups = 2, kHead = 2, kVocab = 100;

DecoderConfig small_config() {
  DecoderConfig config;
  config.vocab_size = 100;
  config.hidden_size = 8;
  config.intermediate_size = 32;
  config.num_layers = 4;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 2;
  config.gated_mlp = false;
  return config;
}

// Two operations for each weight in forward, four in backward; and attention's scores and values.
TEST(NetworkFlops, CountMatrixProducts) {
  constexpr double kTokens = 3 * 16, kSequence = 16;
  const double attention_weights = kHidden * kHead * (2 * kHeads + 2 * kGroups);
  const double scores = 2 * kSequence * kHeads * kHead / 2;  // two products, of which the causal half counts
  const double layer = attention_weights + scores + 2 * kHidden * kFfn;
  const double expected = 6 * kTokens * (kLayers * layer + kHidden * kVocab);
  EXPECT_DOUBLE_EQ(training_flops(decoder_network(small_config()), 3, 16), expected);

  auto gated = small_config();
  gated.gated_mlp = true;
  EXPECT_DOUBLE_EQ(training_flops(decoder_network(gated), 3, 16), expected + 6 * kTokens * kLayers * kHidden * kFfn);

  auto sliding = small_config();
  sliding.sliding_layers = {1, 2};
  sliding.sliding_window = 16;  // the whole sequence
  EXPECT_DOUBLE_EQ(training_flops(decoder_network(sliding), 3, 16), expected);
  sliding.sliding_window = 8;  // 3/8 of the square instead of 1/2
  EXPECT_DOUBLE_EQ(training_flops(decoder_network(sliding), 3, 16), expected - 6 * kTokens * 2 * scores / 4);

  auto sparse = small_config();
  sparse.moe = {.num_experts = 8, .experts_per_token = 2, .intermediate_size = 5, .dense_layers = {0}};
  EXPECT_DOUBLE_EQ(training_flops(decoder_network(sparse), 3, 16),
                   expected + 6 * kTokens * 3 * (2 * 2 * kHidden * 5 - 2 * kHidden * kFfn));

  auto predicting = small_config();
  predicting.prediction.depth = 2;  // each with three norms, eh_proj and the head
  EXPECT_DOUBLE_EQ(training_flops(decoder_network(predicting), 3, 16),
                   expected + 6 * kTokens * 2 * (layer + kHidden * kVocab + 3 * kHidden + 2 * kHidden * kHidden));
}

TEST(NetworkPatterns, NameThePartsOfMegatron) {
  auto config = small_config();
  config.moe = {.num_experts = 8, .experts_per_token = 2, .intermediate_size = 5, .dense_layers = {0, 2}};
  config.prediction.depth = 1;
  const auto network = decoder_network(config);
  const auto patterns = [&](const char* part) { return patterns_of_part(network, "model.", part); };
  EXPECT_THAT(patterns("layer"), ElementsAre("model.layers.{*}", "model.mtp_layers.{*}"));
  EXPECT_THAT(patterns("mlp"), ElementsAre("model.layers.{0,2}.mlp"));
  EXPECT_THAT(patterns("moe"), ElementsAre("model.layers.{1,3}.mlp", "model.mtp_layers.{*}.transformer_layer.mlp"));
  EXPECT_THAT(patterns("core_attn"), ElementsAre("model.layers.{*}.self_attn.core_attention",
                                                 "model.mtp_layers.{*}.transformer_layer.self_attn.core_attention"));
  EXPECT_THAT(patterns("attn_norm"), ElementsAre("model.layers.{*}.input_layernorm",
                                                 "model.mtp_layers.{*}.transformer_layer.input_layernorm"));
  EXPECT_THAT(patterns("mlp_norm"), ElementsAre("model.layers.{*}.post_attention_layernorm",
                                                "model.mtp_layers.{*}.transformer_layer.post_attention_layernorm"));
  EXPECT_THAT(patterns("tower_layer"), IsEmpty());
}

/// A router that keeps its weight in fp32.
class Fp32Router final : public RouterSpec {
 public:
  std::shared_ptr<Router> build(int64_t /*hidden_size*/, const MoeConfig& /*config*/) const override { return nullptr; }
  std::vector<std::string> names_in_fp32() const override { return {"weight"}; }
};

TEST(NetworkDtypes, APartNamesWhatStaysInFp32) {
  auto config = small_config();
  config.moe = {.num_experts = 8, .experts_per_token = 2, .intermediate_size = 5, .dense_layers = {0}};
  config.prediction.depth = 1;
  const auto network = decoder_network(config, [](const DecoderConfig& common, int64_t index) {
    auto layer = decoder_layer(common, index);
    if (common.moe.is_sparse(index)) layer.branches[1].part = experts_of(common, std::make_shared<Fp32Router>());
    return layer;
  });
  const auto keeps = [&](const std::string& name) { return keeps_fp32(network, "model.", "model." + name); };
  EXPECT_TRUE(keeps("layers.1.mlp.gate.weight"));
  EXPECT_TRUE(keeps("mtp_layers.0.transformer_layer.mlp.gate.weight"));
  EXPECT_FALSE(keeps("layers.0.mlp.gate.weight")) << "has no experts";
  EXPECT_FALSE(keeps("layers.1.mlp.experts.gate_up_proj"));
  EXPECT_FALSE(keeps("layers.1.self_attn.gate.weight"));
  EXPECT_FALSE(keeps("layers.4.mlp.gate.weight")) << "there are four layers";
  EXPECT_FALSE(keeps("norm.weight"));
}

}  // namespace
}  // namespace megashard
