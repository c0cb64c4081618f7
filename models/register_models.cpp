#include "models/register_models.h"

#include "models/decoder_model.h"

namespace megashard {

void register_models(ModelRegistry& registry) {
  const auto decoder = [](const Arguments& arguments) -> std::shared_ptr<MultiModalModule> {
    return std::make_shared<DecoderModel>(decoder_config(arguments));
  };
  for (const char* name : {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "llama",
                           "qwen2", "qwen3", "gpt"}) {
    registry.add(name, decoder);
  }
}

}  // namespace megashard
