#include "models/vision/vision_config.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "models/hugging_face/hf_config.h"

namespace megashard {
namespace {

using Json = nlohmann::ordered_json;

VisionNames names_of(VisionKind kind, const std::string& type) {
  if (kind == VisionKind::kQwen2_5) {
    const std::string prefix = "Qwen2_5_VL";
    return {.tower = "Qwen2_5_VisionTransformerPretrainedModel",
            .patch_embed = "Qwen2_5_VisionPatchEmbed",
            .block = prefix + "VisionBlock",
            .attention = prefix + "VisionAttention",
            .mlp = prefix + "MLP",
            .norm = prefix + "RMSNorm",
            .merger = prefix + "PatchMerger"};
  }
  const std::string prefix = type == "qwen3_vl" ? "Qwen3VLVision" : "Qwen3VLMoeVision";
  return {.tower = prefix + "Model",
          .patch_embed = prefix + "PatchEmbed",
          .block = prefix + "Block",
          .attention = prefix + "Attention",
          .mlp = prefix + "MLP",
          .norm = "LayerNorm",
          .merger = prefix + "PatchMerger"};
}

std::vector<int64_t> block_numbers(const HfConfig& config, const char* key, std::vector<int64_t> fallback,
                                   int64_t depth) {
  const auto* list = config.find(key);
  if (list == nullptr) return fallback;
  bool fits = list->is_array();
  std::vector<int64_t> numbers;
  for (const auto& each : *list) {
    fits = fits && each.is_number_integer();
    if (fits) numbers.push_back(each.get<int64_t>());
    fits = fits && numbers.back() >= 0 && numbers.back() < depth;
  }
  TORCH_CHECK(fits, config.path(), ": ", key, " must list blocks of the vision tower's ", depth, ", got ",
              list->dump());
  return numbers;
}

Activation activation_of(const HfConfig& config, const std::string& fallback) {
  const auto name = config.get<std::string>("hidden_act", fallback);
  if (name == "silu" || name == "swish") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  TORCH_CHECK(name == "gelu_pytorch_tanh" || name == "gelu_new", config.path(), ": hidden_act ", name,
              " of vision_config is not supported; known are silu, gelu, gelu_new and gelu_pytorch_tanh");
  return Activation::kGeluTanh;
}

VisionConfig vision_of(const HfConfig& config, const std::string& type) {
  VisionConfig vision;
  const bool old = type == "qwen2_5_vl";
  vision.kind = old ? VisionKind::kQwen2_5 : VisionKind::kQwen3;
  vision.names = names_of(vision.kind, type);
  vision.depth = config.get<int64_t>("depth", old ? 32 : 27);
  vision.hidden_size = config.get<int64_t>("hidden_size", old ? 3584 : 1152);
  vision.intermediate_size = config.get<int64_t>("intermediate_size", old ? 3420 : 4304);
  vision.num_heads = config.get<int64_t>("num_heads", 16);
  vision.in_channels = config.get<int64_t>("in_channels", 3);
  vision.patch_size = config.get<int64_t>("patch_size", old ? 14 : 16);
  vision.temporal_patch_size = config.get<int64_t>("temporal_patch_size", 2);
  vision.merge_size = config.get<int64_t>("spatial_merge_size", 2);
  vision.out_hidden_size = config.get<int64_t>("out_hidden_size", 3584);
  vision.activation = activation_of(config, old ? "silu" : "gelu_pytorch_tanh");
  if (const auto* rope = config.find("rope_parameters"))
    vision.rotary_theta = config.get(*rope, "rope_theta", vision.rotary_theta);
  if (old) {
    vision.window_size = config.get<int64_t>("window_size", 112);
    vision.full_attention_blocks = block_numbers(config, "fullatt_block_indexes", {7, 15, 23, 31}, vision.depth);
    TORCH_CHECK(vision.patch_size > 0 && vision.merge_size > 0 &&
                    vision.window_size / vision.merge_size / vision.patch_size > 0,
                config.path(), ": window_size ", vision.window_size, " of vision_config is smaller than the ",
                vision.merge_size, " patches of ", vision.patch_size, " pixels that are merged");
  } else {
    const auto rows = config.get<int64_t>("num_position_embeddings", 2304);
    vision.position_side = static_cast<int64_t>(std::sqrt(static_cast<double>(rows)));
    TORCH_CHECK(vision.position_side > 0 && vision.position_side * vision.position_side == rows, config.path(),
                ": num_position_embeddings ", rows, " is not the square of a whole number");
    vision.deepstack_blocks = block_numbers(config, "deepstack_visual_indexes", {8, 16, 24}, vision.depth);
  }
  TORCH_CHECK(vision.depth > 0 && vision.num_heads > 0 && vision.hidden_size % (4 * vision.num_heads) == 0,
              config.path(), ": hidden_size ", vision.hidden_size,
              " of vision_config must be a multiple of 4 times num_heads ", vision.num_heads,
              ": positions turn quarters of a head");
  TORCH_CHECK(vision.intermediate_size > 0 && vision.in_channels > 0 && vision.patch_size > 0 &&
                  vision.temporal_patch_size > 0 && vision.merge_size > 0,
              config.path(), ": the sizes of vision_config must be positive");
  return vision;
}

}  // namespace

bool is_vision_language(const Json& config_json) {
  const auto type = config_json.find("model_type");
  return type != config_json.end() && (*type == "qwen2_5_vl" || *type == "qwen3_vl" || *type == "qwen3_vl_moe");
}

VisionLanguageConfig vision_language_config(const Json& config_json, const std::string& path, DecoderConfig text) {
  const HfConfig root(config_json, path);
  const auto type = root.need<std::string>("model_type");
  const auto* vision = root.find("vision_config");
  TORCH_CHECK(is_vision_language(config_json) && vision != nullptr && vision->is_object(), path,
              ": a vision-language model needs model_type qwen2_5_vl, qwen3_vl or qwen3_vl_moe, and a vision_config");
  VisionLanguageConfig config;
  config.text = std::move(text);
  config.vision = vision_of(HfConfig(*vision, path), type);
  config.model_name = type == "qwen2_5_vl" ? "Qwen2_5_VLModel"
                      : type == "qwen3_vl" ? "Qwen3VLModel"
                                           : "Qwen3VLMoeModel";
  config.image_token_id = root.get<int64_t>("image_token_id", 151655);
  config.video_token_id = root.get<int64_t>("video_token_id", 151656);
  if (config.vision.kind == VisionKind::kQwen2_5)
    config.tokens_per_second = root.get(*vision, "tokens_per_second", 4.0);
  TORCH_CHECK(config.vision.out_hidden_size == config.text.hidden_size, path, ": out_hidden_size ",
              config.vision.out_hidden_size, " of vision_config must be hidden_size ", config.text.hidden_size,
              " of the text model");
  TORCH_CHECK(config.vision.deepstack_blocks.size() <= static_cast<size_t>(config.text.num_layers), path, ": ",
              config.vision.deepstack_blocks.size(),
              " deepstack_visual_indexes need as many layers of the text model, which has ", config.text.num_layers);
  return config;
}

}  // namespace megashard
