// Decoders sharded over tensor-parallel ranks, with FSDP2 over the others, compared with unsharded ones.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "framework/arguments/arguments.h"
#include "framework/training/parallel_groups.h"
#include "models/decoder/decoder_model.h"
#include "models/families/model_family.h"
#include "parallel/fsdp/grad_norm.h"
#include "tests/support/message_of.h"
#include "tests/support/model_results.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/seeded_init.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using testing::message_of;
using testing::run_ranks;

DecoderConfig family_config(const std::string& family) {
  const nlohmann::ordered_json config = {{"model_type", family},       {"vocab_size", 40},
                                         {"hidden_size", 16},          {"intermediate_size", 24},
                                         {"num_hidden_layers", 2},     {"num_attention_heads", 4},
                                         {"num_key_value_heads", 2},   {"head_dim", 8},
                                         {"moe_intermediate_size", 8}, {"num_experts", 4},
                                         {"num_experts_per_tok", 2},   {"initializer_range", 0.3},
                                         {"sliding_window", 3},        {"sliding_window_pattern", 2},
                                         {"query_pre_attn_scalar", 5}, {"pad_token_id", 22}};
  return decoder_config_from_hf(HfConfig(config, "config.json"));
}

/// Megatron's GPT: learned positions, LayerNorm, biases, one tied weight.
DecoderConfig gpt_config() {
  DecoderConfig config;
  config.names.model = "GPTModel";
  config.vocab_size = 40;
  config.hidden_size = 16;
  config.intermediate_size = 24;
  config.num_layers = 2;
  config.num_heads = config.num_kv_heads = 4;
  config.head_dim = 4;
  config.max_positions = 12;
  config.norm = NormKind::kLayerNorm;
  config.activation = Activation::kGelu;
  config.gated_mlp = false;
  config.positions = PositionKind::kLearned;
  config.attention_out_bias = config.mlp_bias = true;  // without rotation the bias of keys has no gradient
  config.tie_word_embeddings = true;
  config.init_std = 0.3;
  return config;
}

DecoderConfig predicting_config() {
  auto config = family_config("qwen3_moe");
  config.prediction.depth = 2;
  return config;
}

DecoderConfig config_of(const std::string& family) {
  if (family == "predicting") return predicting_config();
  return family == "gpt" ? gpt_config() : family_config(family);
}

std::shared_ptr<DecoderModel> make(const DecoderConfig& config, TensorParallelRanksPtr ranks = nullptr) {
  BuildContext context;
  if (ranks != nullptr) context.tensor_parallel = std::move(ranks);
  auto model = std::make_shared<DecoderModel>(decoder_network(config), context);
  testing::init_weights(*model, 1);
  for (auto& item : model->named_parameters()) {  // biases start as zeros; random values let them take part
    if (item.key().ends_with("bias")) item.value().set_data(item.value() + 0.1);
  }
  model->to(testing::device_of_tests());
  return model;
}

Batch batch_of(int64_t seed) {
  Batch batch;
  const auto places = at::arange(24, at::TensorOptions(at::kLong).device(at::kCPU));
  batch.set(kTokens, (places.square() + 7 * seed).remainder(40).view({2, 12}));
  batch.set(kLabels, batch.tokens().roll(1, 1));
  batch.labels().select(1, 3).fill_(-100);  // ignored
  return batch;
}

struct Layout {
  int pieces = 2;    // tensor-parallel ranks
  int sharding = 1;  // ranks over which FSDP2 shards each piece
  bool sequence_parallel = false;
};

/// Expects the losses, gradients and norm of a step on every rank to be those of the whole model.
void expect_parity(const std::string& family, const Layout& layout) {
  SCOPED_TRACE(c10::str(family, ", ", layout.pieces, " pieces, ", layout.sharding, " shards",
                        layout.sequence_parallel ? ", sequence parallel" : ""));
  run_ranks(layout.pieces * layout.sharding, [&](const ProcessGroupPtr& world) {
    Arguments arguments;
    arguments.tensor_model_parallel_size = layout.pieces;
    const ParallelGroups groups(arguments, world);
    const auto plain = make(config_of(family));
    const auto model = make(
        config_of(family),
        std::make_shared<TensorParallelRanks>(layout.pieces, groups.tensor_parallel->rank(), layout.sequence_parallel));
    dynamic_cast<FSDP2Mixin&>(*model).fully_shard(
        {.process_group = groups.sharding, .tensor_parallel_group = groups.tensor_parallel});
    testing::expect_weights_of(*plain, *model);

    const auto batch = batch_of(groups.sharding->rank());
    const auto device = testing::device_of_tests();
    const auto expected = testing::result_of(*plain, testing::rows_on(*plain, batch, device));
    const auto losses = testing::result_of(*model, testing::rows_on(*model, batch, device));
    // Sums are split into as many parts as there are ranks: tolerance of PyTorch's fp32 tests, 1.3e-6 relative.
    EXPECT_TRUE(losses.allclose(expected, 1.3e-6, 2e-6)) << (losses - expected).abs().max();
    expected.sum().backward();
    losses.sum().backward();
    testing::average_gradients(*plain, *groups.sharding);
    testing::expect_gradients_of(*plain, *model, 5e-6);
    const double norm = total_grad_norm(model->parameters(), 2).item<double>();
    EXPECT_NEAR(norm / total_grad_norm(plain->parameters()).item<double>(), 1, 2e-6);
  });
}

TEST(TensorParallelDecoder, EveryFamilyTrainsAsTheWholeModel) {
  for (const char* family : {"llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt", "predicting"}) {
    expect_parity(family, {.pieces = 2});
    expect_parity(family, {.pieces = 2, .sequence_parallel = true});
  }
}

TEST(TensorParallelDecoder, PiecesAreSharded) {
  for (const char* family : {"qwen3", "qwen3_moe", "gpt", "predicting"}) {
    expect_parity(family, {.pieces = 2, .sharding = 2});
    expect_parity(family, {.pieces = 2, .sharding = 2, .sequence_parallel = true});
  }
  expect_parity("gpt", {.pieces = 4});
}

TEST(TensorParallelDecoder, LogitsAreWhole) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Arguments arguments;
    arguments.tensor_model_parallel_size = 2;
    const ParallelGroups groups(arguments, world);
    const auto plain = make(config_of("qwen3"));
    const auto model = make(config_of("qwen3"), std::make_shared<TensorParallelRanks>(2, world->rank(), false));
    dynamic_cast<FSDP2Mixin&>(*model).fully_shard(
        {.process_group = groups.sharding, .tensor_parallel_group = groups.tensor_parallel});
    auto batch = batch_of(0);
    batch.take(kLabels);
    const auto device = testing::device_of_tests();
    const auto expected = testing::result_of(*plain, testing::rows_on(*plain, batch, device));
    const auto logits = testing::result_of(*model, testing::rows_on(*model, batch, device));
    ASSERT_EQ(logits.sizes(), expected.sizes());
    EXPECT_TRUE(logits.allclose(expected, 1.3e-6, 1e-5));
  });
}

TEST(TensorParallelDecoder, LayersThatHaveNoGroupSayWhatIsMissing) {
  const auto ranks = std::make_shared<TensorParallelRanks>(2, 0, false);
  const auto model = make(config_of("qwen3"), ranks);
  EXPECT_THAT(message_of([&] {
                testing::result_of(*model, testing::rows_on(*model, batch_of(0), testing::device_of_tests()));
              }),
              ::testing::HasSubstr("shard the model by FSDP2Mixin::fully_shard first"));
  EXPECT_THAT(message_of([&] { ranks->set_group(nullptr); }),
              ::testing::HasSubstr("give ShardingRequest::tensor_parallel_group"));
}

}  // namespace
}  // namespace megashard
