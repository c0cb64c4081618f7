#include "models/diffusion/latent_families.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/support/formula.h"

namespace megashard {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using testing::message_of;

/// A small model; `changes`: replace keys, null takes one out.
std::shared_ptr<LatentModel> make(const std::string& class_name, const ordered_json& changes = {}) {
  ordered_json config = {{"_class_name", class_name},
                         {"num_attention_heads", 4},
                         {"attention_head_dim", 24},
                         {"num_layers", 1},
                         {"in_channels", 4}};
  if (class_name.starts_with("Hunyuan")) config.update({{"out_channels", 4}, {"rope_axes_dim", {4, 8, 12}}});
  const ordered_json wan = {{"out_channels", 4}, {"text_dim", 20}, {"freq_dim", 16}, {"ffn_dim", 300}};
  const ordered_json joint = {{"joint_attention_dim", 20}, {"axes_dims_rope", {4, 8, 12}}};
  if (!class_name.starts_with("Hunyuan")) config.update(class_name.starts_with("Wan") ? wan : joint);
  if (!changes.is_null()) config.update(changes);
  return latent_family_of(config)->make({config, "config.json"});
}

std::string refusal(const std::string& class_name, const ordered_json& changes) {
  return message_of([&] { make(class_name, changes); });
}

TEST(LatentFamilies, AreChosenByTheirClass) {
  EXPECT_EQ(latent_family_of({{"model_type", "llama"}}), nullptr);
  EXPECT_EQ(latent_family_of({{"_class_name", "AutoencoderKLWan"}}), nullptr);
  for (const auto& family : latent_families())
    EXPECT_EQ(latent_family_of({{"_class_name", family.class_name}}), &family);
}

TEST(LatentFamilies, RefuseWhatTheyDoNotCompute) {
  constexpr const char* kWan = "WanTransformer3DModel";
  constexpr const char* kFlux = "FluxTransformer2DModel";
  EXPECT_THAT(refusal(kWan, {{"gated", true}}), HasSubstr("config.json: gated is no key of this class"));
  EXPECT_THAT(refusal(kWan, {{"qk_norm", nullptr}}), HasSubstr("qk_norm is null; only rms_norm_across_heads"));
  EXPECT_THAT(refusal(kWan, {{"image_dim", 8}}), HasSubstr("added_kv_proj_dim is 0, but must be the model's width 96"));
  EXPECT_THAT(refusal(kWan, {{"in_channels", 3}}), HasSubstr("are fewer than those of the output, 4"));
  EXPECT_THAT(refusal(kWan, {{"patch_size", {2, 2}}}), HasSubstr("patch_size has 2 numbers, not 3"));
  EXPECT_THAT(refusal("WanVACETransformer3DModel", {{"vace_layers", {0, 1}}}),
              HasSubstr("vace_layers must begin with 0, rise, and be fewer than num_layers 1"));
  EXPECT_THAT(refusal(kFlux, {{"axes_dims_rope", {4, 8, 16}}}), HasSubstr("whose sum is attention_head_dim, 24"));
  EXPECT_THAT(refusal(kFlux, {{"patch_size", 2}}), HasSubstr("patch_size must be 1"));
  EXPECT_THAT(refusal("QwenImageTransformer2DModel", {{"out_channels", 1}, {"zero_cond_t", true}}),
              HasSubstr("zero_cond_t is true, which is not supported"));
  constexpr const char* kHunyuan = "HunyuanVideo15Transformer3DModel";
  EXPECT_THAT(refusal(kHunyuan, {{"mlp_ratio", 3.0}}), HasSubstr("mlp_ratio is 3; only 4 is supported"));
  EXPECT_THAT(refusal(kHunyuan, {{"qk_norm", "layer_norm"}}), HasSubstr("qk_norm is layer_norm; only rms_norm"));
  EXPECT_THAT(refusal(kHunyuan, {{"use_meanflow", true}}), HasSubstr("use_meanflow is true, which is not supported"));
}

TEST(LatentFamilies, InitialWeightsAreThoseOfWan) {
  const auto model = make("WanTransformer3DModel");
  model->init_weights();
  const auto parameters = model->named_parameters();
  const auto deviation = [&](const char* name) { return parameters[name].std().item<double>(); };
  // 28,800 values: their standard deviation is known to within 0.5%.
  EXPECT_NEAR(deviation("blocks.0.ffn.net.2.weight") / std::sqrt(2.0 / (96 + 300)), 1, 0.02);
  EXPECT_NEAR(deviation("blocks.0.scale_shift_table") * std::sqrt(96.0), 1, 0.15);  // of 576 values
  EXPECT_EQ(parameters["proj_out.weight"].count_nonzero().item<int64_t>(), 0);
  EXPECT_EQ(parameters["blocks.0.attn1.to_q.bias"].count_nonzero().item<int64_t>(), 0);
  EXPECT_TRUE(parameters["blocks.0.norm2.weight"].eq(1).all().item<bool>());
}

TEST(LatentFamilies, KeepInFp32WhatDiffusersKeeps) {
  const auto model = make("WanTransformer3DModel");
  EXPECT_TRUE(model->keeps_fp32("blocks.0.norm2.weight"));
  EXPECT_TRUE(model->keeps_fp32("scale_shift_table"));
  EXPECT_TRUE(model->keeps_fp32("condition_embedder.time_embedder.linear_1.weight"));
  EXPECT_FALSE(model->keeps_fp32("blocks.0.attn1.norm_q.weight"));
  EXPECT_FALSE(model->keeps_fp32("condition_embedder.time_proj.weight"));
  EXPECT_FALSE(make("FluxTransformer2DModel")->keeps_fp32("transformer_blocks.0.norm1.linear.weight"));
}

TEST(LatentModel, SaysWhatBatchItTakes) {
  const auto model = make("WanTransformer3DModel", {{"in_channels", 9}});
  Batch batch;
  batch.set(kLatents, at::zeros({12, 1, 4}));
  EXPECT_THAT(message_of([&] { (*model)(batch); }), HasSubstr("takes latents [16, B, T], got [12, 1, 4]"));
  batch.set(kLatents, at::zeros({16, 1, 4}));
  EXPECT_THAT(message_of([&] { (*model)(batch); }),
              HasSubstr("takes 20 values of conditions for a patch, and the data have 0"));
  batch.set(kSecondText, at::zeros({1, 2, 3}), Axis::kRow);
  EXPECT_THAT(message_of([&] { (*model)(batch); }), HasSubstr("takes features of one text encoder"));
  EXPECT_THAT(message_of([&] { model->check_sequence_ranks(3); }), HasSubstr("WanTransformer3DModel"));
}

}  // namespace
}  // namespace megashard
