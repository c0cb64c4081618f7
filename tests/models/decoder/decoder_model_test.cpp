#include "models/decoder/decoder_model.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "framework/arguments/arguments.h"
#include "models/families/model_family.h"
#include "models/lora/lora.h"
#include "models/register_models.h"
#include "tests/support/model_results.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// Megatron's defaults: gelu, LayerNorm, learned positions, biases, dropouts.
Arguments megatrons_network() {
  Arguments arguments;
  arguments.num_layers = 2;
  arguments.hidden_size = 32;
  arguments.num_attention_heads = 4;
  arguments.max_position_embeddings = 16;
  arguments.padded_vocab_size = 64;
  return arguments;
}

Arguments small_network() {
  Arguments arguments = megatrons_network();
  arguments.position_embedding_type = PositionEmbeddingType::kRope;
  arguments.normalization = Normalization::kRmsNorm;
  arguments.swiglu = true;
  arguments.add_bias_linear = false;
  arguments.attention_dropout = arguments.hidden_dropout = 0;
  return arguments;
}

std::shared_ptr<MultiModalModule> make(const Arguments& arguments) {
  ModelRegistry registry;
  register_models(registry);
  auto model = registry.create(arguments);
  auto generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(1);
  dynamic_cast<WeightInitMixin&>(*model).init_weights();
  model->to(testing::device_of_tests());
  return model;
}

/// A small network; in the families that have windows, with windows of 3 tokens.
DecoderConfig small_config(const std::string& family) {
  const nlohmann::ordered_json config = {{"model_type", family},       {"vocab_size", 40},
                                         {"hidden_size", 16},          {"intermediate_size", 24},
                                         {"num_hidden_layers", 2},     {"num_attention_heads", 2},
                                         {"num_key_value_heads", 1},   {"head_dim", 8},
                                         {"moe_intermediate_size", 8}, {"num_experts", 4},
                                         {"num_experts_per_tok", 2},   {"initializer_range", 0.3},
                                         {"sliding_window", 3},        {"sliding_window_pattern", 2},
                                         {"query_pre_attn_scalar", 5}};
  return decoder_config_from_hf(HfConfig(config, "config.json"));
}

std::shared_ptr<DecoderModel> make_small(const std::string& family) {
  auto model = std::make_shared<DecoderModel>(decoder_network(small_config(family)));
  auto generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(1);
  model->init_weights();
  return model;
}

at::Tensor on_host(std::initializer_list<int64_t> numbers) {
  return at::tensor(at::IntArrayRef(numbers), at::TensorOptions(at::kLong).device(at::kCPU));
}

Batch some_input() {
  const auto tokens = at::randint(0, 64, {2, 8}, at::kLong);
  return testing::tokens_and_labels(tokens, tokens.flip({1}));
}

TEST(DecoderModel, EveryNamedSubmoduleCanBeWrapped) {
  auto arguments = small_network();
  arguments.qk_layernorm = true;
  const auto model = make(arguments);
  std::map<std::string, std::string> classes;
  for (const auto& item : model->named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    const auto* hooked = dynamic_cast<HookedModule*>(item.value().get());
    if (item.key() == "model.layers") continue;  // skips the container
    ASSERT_NE(hooked, nullptr) << item.key();
    classes[item.key()] = hooked->class_name();
  }
  EXPECT_EQ(classes.at("model.layers.1.self_attn.k_norm"), "RMSNorm");
  EXPECT_EQ(classes.at("model.layers.1.self_attn"), "SelfAttention");
  EXPECT_EQ(classes.at("model.layers.0.mlp.down_proj"), "Linear");
  EXPECT_EQ(classes.at("model.layers.0"), "TransformerLayer");
  EXPECT_EQ(classes.at("model.embed_tokens"), "Embedding");
  EXPECT_EQ(classes.at("lm_head"), "Linear");
  EXPECT_EQ(model->class_name(), "GPTModel");
}

TEST(DecoderModel, TiedWeightsAreOneTensor) {
  const auto model = make(small_network());
  const auto parameters = model->named_parameters();
  EXPECT_TRUE(parameters["lm_head.weight"].is_same(parameters["model.embed_tokens.weight"]));
  auto arguments = small_network();
  arguments.untie_embeddings_and_output_weights = true;
  const auto untied = make(arguments)->named_parameters();
  EXPECT_FALSE(untied["lm_head.weight"].is_same(untied["model.embed_tokens.weight"]));
}

TEST(DecoderModel, InitialisationAsMegatrons) {
  auto arguments = small_network();
  arguments.hidden_size = 256;
  arguments.add_bias_linear = true;
  const auto parameters = make(arguments)->named_parameters();
  const auto std_of = [&](const char* name) { return parameters[name].std().item<double>(); };
  EXPECT_NEAR(std_of("model.layers.0.self_attn.q_proj.weight"), 0.02, 5e-4);
  EXPECT_NEAR(std_of("model.layers.0.self_attn.o_proj.weight"), 0.01, 3e-4);  // divided by sqrt(2 layers)
  EXPECT_NEAR(std_of("model.layers.1.mlp.down_proj.weight"), 0.01, 3e-4);
  EXPECT_NEAR(std_of("model.embed_tokens.weight"), 0.02, 5e-4);
  EXPECT_EQ(parameters["model.layers.1.mlp.down_proj.bias"].abs().max().item<double>(), 0);
  EXPECT_TRUE(at::equal(parameters["model.norm.weight"], at::ones({256})));
}

TEST(DecoderModel, MegatronsDefaultNetworkTrains) {
  const auto model = make(megatrons_network());
  const auto input = some_input();
  const auto loss = testing::result_of(*model, input);
  EXPECT_EQ(loss.sizes(), at::IntArrayRef({2, 8}));
  EXPECT_NEAR(loss.mean().item<double>(), std::log(64.0), 0.1);
  loss.mean().backward();
  for (const auto& item : model->named_parameters()) {
    const auto& grad = item.value().grad();
    ASSERT_TRUE(grad.defined()) << item.key();
    if (item.key().find("k_proj.bias") == std::string::npos) {  // softmax cancels this bias
      EXPECT_GT(grad.abs().max().item<double>(), 0) << item.key();
    }
  }
  EXPECT_FALSE(at::equal(testing::result_of(*model, input), testing::result_of(*model, input)));  // dropout
  model->eval();
  EXPECT_TRUE(at::equal(testing::result_of(*model, input), testing::result_of(*model, input)));
}

TEST(DecoderModel, DocumentsAndPositionsAsGivenOnes) {
  const auto model = make(small_network());
  auto input = some_input();
  const auto loss = testing::result_of(*model, input);
  input.document_lengths = on_host({8, 8});
  input.set(kPositionIds, at::arange(8, at::kLong).expand({2, 8}).contiguous());
  EXPECT_LT((testing::result_of(*model, input) - loss).abs().max().item<double>(), 1e-5);
  input.set(kPositionIds, input.position_ids() * 2);
  EXPECT_GT((testing::result_of(*model, input) - loss).abs().max().item<double>(), 1e-5);
}

TEST(DecoderModel, TheHostWaitsForNoGpuWhateverThePositions) {
  if (!testing::on_simulated_device()) GTEST_SKIP() << "nobody waits for a CPU";
  const auto windows = make_small("gemma3_text");
  windows->to(testing::device_of_tests());
  const auto in_bf16 = make(small_network());  // packed documents use flash attention
  in_bf16->to(at::kBFloat16);
  const auto host = at::TensorOptions(at::kLong).device(at::kCPU);
  for (const auto& model : std::vector<std::shared_ptr<MultiModalModule>>{make(small_network()), in_bf16, windows}) {
    for (const auto& positions : {at::Tensor(), at::arange(8, host).expand({2, 8})}) {
      Batch whole;  // not pinned
      whole.set(kTokens, at::ones({2, 8}, host));
      whole.set(kLabels, whole.tokens());
      whole.set(kPositionIds, positions);
      if (positions.defined()) whole.document_lengths = on_host({5, 3, 8});
      const auto step = [&] {
        testing::result_of(*model, testing::rows_on(*model, whole, at::Device(at::kCUDA, 0))).sum().backward();
      };
      step();
      testing::simulated_cuda().take_host_syncs();
      step();
      EXPECT_THAT(testing::simulated_cuda().take_host_syncs(), ::testing::IsEmpty());
    }
  }
}

using Results = std::map<std::string, at::Tensor>;

/// Losses and gradients of two sequences, computed on `device`, returned in host memory.
Results trained_on(c10::Device device, at::ScalarType dtype, const std::string& family, bool adapters) {
  const auto made = make_small(family);
  auto& model = *made;
  if (adapters) {
    add_lora(model, {.rank = 2, .target_modules = {"all-linear"}});
    const at::NoGradGuard no_grad;  // adapters are initialised to add zeros
    for (auto& item : model.named_parameters()) {
      if (item.key().find("lora_B") != std::string::npos) item.value().fill_(0.5);
    }
  }
  model.to(device, dtype);
  Batch input;
  input.set(kTokens, at::arange(16, at::TensorOptions(at::kLong).device(at::kCPU)).view({2, 8}) * 7 % 40);
  input.set(kLabels, (input.tokens() + 1) % 40);
  const auto losses = testing::result_of(model, testing::rows_on(model, input, device));
  losses.sum().backward();
  Results results{{"losses", losses.detach().cpu()}};
  for (const auto& item : model.named_parameters()) {
    EXPECT_EQ(item.value().device().type(), device.type()) << item.key();
    if (item.value().requires_grad()) results[item.key()] = item.value().grad().cpu();
  }
  return results;
}

TEST(DecoderModel, AGpuTrainsEveryFamilyAsTheCpuDoes) {
  MEGASHARD_SIM_ONLY();
  for (const auto& [family, adapters] :
       {std::pair{"llama", false}, std::pair{"qwen2", false}, std::pair{"qwen3", false}, std::pair{"qwen3_moe", false},
        std::pair{"mistral", false}, std::pair{"gemma3_text", false}, std::pair{"llama", true},
        std::pair{"qwen3_moe", true}}) {
    SCOPED_TRACE(c10::str(family, adapters ? " with adapters" : ""));
    const auto expected = trained_on(at::kCPU, at::kDouble, family, adapters);
    const auto got = trained_on(at::kCUDA, at::kDouble, family, adapters);
    ASSERT_EQ(got.size(), expected.size());
    // The GPU's attention is a different kernel; large adapters and routers amplify roundings.
    const auto expect_close = [&](const Results& found, double bar) {
      for (const auto& [name, value] : expected) {
        const double largest = value.abs().max().item<double>();
        EXPECT_LE((found.at(name) - value).abs().max().item<double>(), bar * largest) << name;
        EXPECT_GT(largest, 0) << name;
      }
    };
    // Gemma's norms compute in fp32, and add in another order on the GPU.
    expect_close(got, std::string_view(family) == "gemma3_text" ? 4e-6 : 1e-11);
    if (adapters || std::string_view(family) == "qwen3_moe") continue;
    expect_close(trained_on(at::kCUDA, at::kFloat, family, adapters), 4e-6);
  }
}

// --neat-packing, and --reset-attention-mask with --reset-position-ids: a document trains as if it were alone.
TEST(DecoderModel, PackedRowsTrainAsTheirDocumentsAlone) {
  for (const char* family : {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"}) {
    SCOPED_TRACE(family);
    const auto packed = make_small(family), alone = make_small(family);
    packed->to(testing::device_of_tests());
    alone->to(testing::device_of_tests());
    const auto options = at::TensorOptions(at::kLong).device(testing::device_of_tests());
    const auto tokens = at::arange(22, options) * 7 % 40, labels = tokens.flip({0});
    Batch rows;  // rows of 11 tokens: documents of 5 and 6, then one of 9 with padding
    rows.set(kTokens, tokens.view({2, 11}));
    rows.set(kLabels, labels.view({2, 11}));
    rows.document_lengths = on_host({5, 6, 9, 2});
    rows.set(kTokenMask, at::arange(22, options).lt(20).view({2, 11}));
    std::vector<at::Tensor> positions;
    for (const int64_t length : {5, 6, 9, 2}) positions.push_back(at::arange(length, options));
    rows.set(kPositionIds, at::cat(positions).view({2, 11}));
    const auto together = testing::result_of(*packed, rows).flatten().narrow(0, 0, 20);
    together.mean().backward();
    for (const auto& [begin, length] : {std::pair{0, 5}, std::pair{5, 6}, std::pair{11, 9}}) {
      Batch one;
      one.set(kTokens, tokens.narrow(0, begin, length).view({1, length}));
      one.set(kLabels, labels.narrow(0, begin, length).view({1, length}));
      const auto losses = testing::result_of(*alone, one);
      EXPECT_LE((losses - together.narrow(0, begin, length)).abs().max().item<double>(), 2e-6) << begin;  // fp32
      (losses.sum() / 20).backward();
    }
    const auto wanted = alone->named_parameters();
    for (const auto& item : packed->named_parameters()) {
      const auto grad = wanted[item.key()].grad();
      EXPECT_LE((item.value().grad() - grad).abs().max().item<double>(), 2e-6 * grad.abs().max().item<double>())
          << item.key();  // sums over rows round in another order
    }
  }
}

TEST(DecoderModel, ZeroCentredNormsBeginAtZero) {
  auto arguments = small_network();
  const auto plain = make(arguments);
  arguments.apply_layernorm_1p = true;
  const auto model = make(arguments);
  const auto parameters = model->named_parameters();
  EXPECT_EQ(parameters["model.norm.weight"].abs().max().item<double>(), 0);
  const auto input = some_input();
  EXPECT_TRUE(testing::result_of(*model, input).equal(testing::result_of(*plain, input)));  // 1 + 0
  const auto gemma = make_small("gemma3_text")->named_parameters();
  EXPECT_EQ(gemma["model.layers.0.post_feedforward_layernorm.weight"].abs().max().item<double>(), 0);
}

TEST(DecoderModel, ATokenOutsideTheEmbeddingIsAnError) {
  MEGASHARD_NOT_ON_SIM("on a GPU the kernel asserts, as a check would stall the stream");
  const auto model = make(small_network());
  auto input = some_input();
  input.tokens()[0][0] = 64;
  EXPECT_THAT([&] { testing::result_of(*model, input); },
              ThrowsMessage<c10::Error>(HasSubstr("64 lies outside an embedding of 64 rows")));
}

TEST(DecoderModel, AnUnknownArchitectureIsAnError) {
  ModelRegistry registry;
  register_models(registry);
  EXPECT_THAT(
      [&] { registry.create({}, "BertModel"); },
      ThrowsMessage<c10::Error>(HasSubstr("no model is registered for architecture BertModel; known are: Cohere2")));
  EXPECT_THROW(register_models(registry), c10::Error);
}

}  // namespace
}  // namespace megashard
