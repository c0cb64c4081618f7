#include "models/hugging_face/hf_families.h"

namespace megashard {

const std::map<std::string, HfFamily>& hf_families() {
  static const std::map<std::string, HfFamily> known = {
      {"llama", {.prefix = "Llama", .mlp_bias = true}},
      {"qwen2", {.prefix = "Qwen2", .default_kv_heads = 32, .always_qkv_bias = true, .windows = true}},
      {"qwen3", {.prefix = "Qwen3", .default_kv_heads = 32, .default_head_dim = 128, .qk_norm = true, .windows = true}},
      {"qwen3_moe", {.prefix = "Qwen3Moe", .default_kv_heads = 4, .qk_norm = true, .windows = true, .experts = true}},
      {"qwen2_5_vl",
       {.prefix = "Qwen2_5_VL",
        .default_kv_heads = 8,
        .always_qkv_bias = true,
        .windows = true,
        .mrope_section = {16, 24, 24},
        .default_theta = 1e6,
        .default_norm_eps = 1e-5}},
      {"qwen3_vl",
       {.prefix = "Qwen3VLText",
        .default_kv_heads = 32,
        .default_head_dim = 128,
        .qk_norm = true,
        .mrope_section = {24, 20, 20},
        .default_theta = 500000}},
      {"qwen3_vl_moe",
       {.prefix = "Qwen3VLMoeText",
        .default_kv_heads = 16,
        .qk_norm = true,
        .experts = true,
        .mrope_section = {24, 20, 20},
        .default_theta = 500000}},
  };
  return known;
}

}  // namespace megashard
