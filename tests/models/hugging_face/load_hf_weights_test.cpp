#include "models/hugging_face/load_hf_weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "checkpoint/hugging_face/hf_weights.h"
#include "models/decoder/decoder_model.h"
#include "models/model_config.h"
#include "parallel/fsdp/fully_shard.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/model_results.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

/// 22 hidden channels and 61 tokens: neither divides by 3 ranks, and norms over heads leave one rank without rows.
Network small_network(bool tied) {
  Arguments arguments;
  arguments.num_layers = 2;
  arguments.hidden_size = 22;
  arguments.num_attention_heads = 2;
  arguments.max_position_embeddings = 16;
  arguments.padded_vocab_size = 61;
  arguments.ffn_hidden_size = 50;
  arguments.kv_channels = 4;
  arguments.position_embedding_type = PositionEmbeddingType::kRope;
  arguments.normalization = Normalization::kRmsNorm;
  arguments.swiglu = true;
  arguments.untie_embeddings_and_output_weights = !tied;
  arguments.add_bias_linear = false;
  arguments.qk_layernorm = true;
  arguments.attention_dropout = arguments.hidden_dropout = 0;
  return decoder_network(decoder_config_from_flags(arguments));
}

/// A tied model with weights, and a directory with its files.
struct Saved {
  Saved() {
    model.init_weights();
    model.to(device_of_tests());
    std::vector<TensorInfo> infos;
    for (const auto& item : model.named_parameters()) {
      if (item.key() == "lm_head.weight") continue;  // as transformers stores tied models
      infos.push_back({item.key(), item.value().scalar_type(), item.value().sizes().vec()});
    }
    save_hf_weights(folder.path(), infos,
                    [this](const TensorInfo& info) { return model.named_parameters()[info.name].detach(); });
  }
  TemporaryFolder folder;
  DecoderModel model{small_network(/*tied=*/true)};
};

TEST(LoadHfWeights, EachRankItsRowsAndTheSameModelAfterwards) {
  Saved saved;
  const auto tokens = at::randint(0, 61, {2, 7}, at::kLong);
  const auto logits = testing::result_of(saved.model, testing::tokens_and_labels(tokens));
  const auto loss = testing::result_of(saved.model, testing::tokens_and_labels(tokens, tokens));
  loss.sum().backward();
  std::map<std::string, at::Tensor> whole;
  for (const auto& item : saved.model.named_parameters()) whole[item.key()] = item.value().grad();
  run_ranks(3, [&](const ProcessGroupPtr& world) {
    DecoderModel model(small_network(/*tied=*/true));
    model.fully_shard({.process_group = world});  // layers first, then the root with both tied weights
    EXPECT_TRUE(is_fsdp_module(*model.named_modules("", /*include_self=*/false)["model.layers.1"]));
    load_hf_weights(model, saved.folder.path());
    const auto here = tokens.to(device_of_tests());
    Batch input = testing::tokens_and_labels(here);
    // Sharded, q, k and v are one product, and so are gate and up: they add in another order.
    EXPECT_LE((testing::result_of(model, input) - logits.to(here.device())).abs().max().item<double>(),
              2e-6 * logits.abs().max().item<double>());
    input.set(kLabels, here);
    testing::result_of(model, input).sum().backward();
    for (const auto& item : model.named_parameters()) {
      const auto view = reshard_and_view(item.value());
      if (view.local.size(0) == 0) continue;
      const auto expected = whole.at(item.key()).to(here.device());
      const auto rows = expected.narrow(0, view.offsets[0], view.local.size(0));
      EXPECT_LT((item.value().grad() - rows).abs().max().item<double>(), 5e-6 * expected.abs().max().item<double>())
          << item.key();
    }
  });
}

TEST(LoadHfWeights, AnUntiedHeadTakesTheEmbeddingAndIsTold) {
  const Saved saved;
  DecoderModel model(small_network(/*tied=*/false));
  model.to(device_of_tests());
  std::vector<std::string> told;
  load_hf_weights(model, saved.folder.path(), [&](Severity, const std::string& text) { told.push_back(text); });
  EXPECT_THAT(told, ::testing::ElementsAre(::testing::HasSubstr("has no lm_head.weight, and config.json says")));
  const auto parameters = model.named_parameters();
  EXPECT_FALSE(parameters["lm_head.weight"].is_same(parameters["model.embed_tokens.weight"]));
  EXPECT_TRUE(at::equal(parameters["lm_head.weight"], saved.model.named_parameters()["model.embed_tokens.weight"]));
}

using Renaming = std::function<std::string(const std::string&)>;

/// Loads a tied model from weights with other names. With `head`: the head differs from the embeddings. With `told`:
/// the files have frequencies. Returns the error; empty if the weights were loaded.
std::string error_of_names(const Saved& saved, const Renaming& rename, bool head,
                           std::vector<std::string>* told = nullptr) {
  TemporaryFolder folder;
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : saved.model.named_parameters()) {
    if (item.key() != "lm_head.weight") weights[rename(item.key())] = item.value().detach();
  }
  if (head) weights[rename("lm_head.weight")] = weights[rename("model.embed_tokens.weight")] + 1;
  if (told != nullptr) weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::ones({2});
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : weights) infos.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  save_hf_weights(folder.path(), infos, [&](const TensorInfo& info) { return weights.at(info.name); });
  DecoderModel model(small_network(/*tied=*/true));
  model.to(device_of_tests());
  try {
    load_hf_weights(model, folder.path(), [&](Severity, const std::string& text) {
      if (told != nullptr) told->push_back(text);
    });
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  for (const auto& item : model.named_parameters())
    EXPECT_TRUE(at::equal(item.value(), saved.model.named_parameters()[item.key()])) << item.key();
  return "";
}

TEST(LoadHfWeights, EveryTensorIsUsedOrTold) {
  const Saved saved;
  const Renaming same = [](const std::string& name) { return name; };
  const Renaming bare = [](const std::string& name) { return name.substr(6); };
  const Renaming compiled = [](const std::string& name) { return "_orig_mod." + name; };
  std::vector<std::string> told;
  EXPECT_EQ(error_of_names(saved, same, /*head=*/false, &told), "");
  EXPECT_THAT(told, ::testing::ElementsAre(::testing::HasSubstr("1 tensors are not used")));
  EXPECT_THAT(error_of_names(saved, same, /*head=*/true),
              ::testing::HasSubstr("has other values for lm_head.weight than for model.embed_tokens.weight"));
  EXPECT_EQ(error_of_names(saved, bare, /*head=*/false), "");
  EXPECT_THAT(error_of_names(saved, compiled, /*head=*/false),
              ::testing::HasSubstr("their names have \"_orig_mod.\", the mark of torch.compile, in them"));
}

TEST(LoadHfWeights, OtherWeightsAreListedAndNothingChanges) {
  const Saved saved;
  auto config = small_network(/*tied=*/true).config;
  config.num_layers = 4;
  config.intermediate_size = 70;
  DecoderModel model(decoder_network(config));
  model.init_weights();
  model.to(device_of_tests());
  const auto before = model.named_parameters()["model.embed_tokens.weight"].clone();
  EXPECT_THAT([&] { load_hf_weights(model, saved.folder.path()); },
              ::testing::ThrowsMessage<c10::Error>(::testing::AllOf(
                  ::testing::HasSubstr("missing: model.layers.2."), ::testing::HasSubstr(", and 2 more"),
                  ::testing::HasSubstr("of other sizes: model.layers.0.mlp.gate_proj.weight"))));
  EXPECT_TRUE(at::equal(model.named_parameters()["model.embed_tokens.weight"], before));
}

}  // namespace
}  // namespace megashard::testing
