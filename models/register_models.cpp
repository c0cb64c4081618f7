#include "models/register_models.h"

#include "models/decoder_model.h"
#include "models/megatron_layout.h"
#include "models/vision/qwen_vl_model.h"

namespace megashard {

void register_models(ModelRegistry& registry) {
  const auto decoder = [](const Arguments& arguments) -> std::shared_ptr<MultiModalModule> {
    return std::make_shared<DecoderModel>(decoder_config(arguments));
  };
  for (const char* name : {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "llama",
                           "qwen2", "qwen3", "qwen3_moe", "gpt"}) {
    registry.add(name, decoder);
  }
  for (const char* name : {"Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
                           "Qwen3VLMoeForConditionalGeneration", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}) {
    registry.add(name, [](const Arguments& arguments) -> std::shared_ptr<MultiModalModule> {
      return std::make_shared<QwenVlModel>(vision_language_config_from_hf(arguments));
    });
  }
  for (const char* name : {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "llama", "qwen2", "qwen3"}) {
    registry.add_layout(name, [](const std::filesystem::path& hf_dir, int64_t vocab_divisor) {
      return megatron_layout(decoder_config_from_hf(hf_dir), vocab_divisor);
    });
  }
}

}  // namespace megashard
