#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "models/decoder/decoder_model.h"
#include "models/families/model_family.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {

constexpr int64_t kImage = 50, kVideo = 51;

/// Config of qwen2_5_vl, qwen3_vl, qwen3_vl_moe or glm4v_moe; only the last two have experts.
inline nlohmann::ordered_json small_vl(const std::string& type) {
  const auto json = nlohmann::ordered_json::parse(R"({
    "image_token_id": 50, "video_token_id": 51,
    "text_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 60,
      "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
      "output_router_logits": true, "router_aux_loss_coef": 0.3,
      "max_position_embeddings": 64,
      "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
    "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2,
      "patch_size": 2, "out_hidden_size": 16, "window_size": 8, "fullatt_block_indexes": [1],
      "num_position_embeddings": 9, "deepstack_visual_indexes": [0]}})");
  auto typed = json;
  typed["model_type"] = type;
  if (type == "glm4v_moe") {
    typed["text_config"].update({{"n_routed_experts", 4}, {"output_router_logits", false}});
    typed["text_config"]["rope_scaling"]["partial_rotary_factor"] = 1.0;
    typed["vision_config"]["image_size"] = 6;
  }
  return typed;
}

/// Random weights, the same in each call. If there are several parts, only this part's experts.
inline std::shared_ptr<DecoderModel> make_vl(const std::string& type, int ep_size = 1, int ep_rank = 0) {
  const HfConfig config(small_vl(type), "config.json");
  auto model = std::make_shared<DecoderModel>(network_from_hf(config),
                                              BuildContext{.experts = {.ranks = ep_size, .rank = ep_rank}},
                                              family_of(config).weight_files);
  model->weight_init().std = 0.3;
  model->weight_init().generator = at::detail::createCPUGenerator(3);
  model->init_weights();
  model->to(device_of_tests());
  return model;
}

}  // namespace megashard::testing
