#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// What the classes of a family do, and their defaults for what config.json leaves out.
struct HfFamily {
  const char* prefix;            // of class names
  int64_t default_kv_heads = 0;  // 0: as many as heads
  std::optional<int64_t> default_head_dim{};
  bool always_qkv_bias = false;  // and no bias on o_proj
  bool qk_norm = false;
  bool mlp_bias = false;  // config.json has mlp_bias
  bool windows = false;   // config.json has sliding_window
  bool experts = false;
  // Of vision-language models, whose text part may lie in text_config:
  std::vector<int64_t> mrope_section{};
  double default_theta = 10000;
  double default_norm_eps = 1e-6;
};

/// By model_type of config.json.
const std::map<std::string, HfFamily>& hf_families();

}  // namespace megashard
