#include "models/register_models.h"

#include "framework/mistakes.h"
#include "models/decoder/decoder_model.h"
#include "models/diffusion/latent_families.h"
#include "models/families/model_family.h"
#include "models/megatron_layout.h"
#include "models/model_config.h"

namespace megashard {
namespace {

std::shared_ptr<MultiModalModule> model_of(const Arguments& arguments, const HfConfig* config) {
  auto context = build_context(arguments);
  if (config == nullptr) return std::make_shared<DecoderModel>(network_of(arguments), std::move(context));
  return make_model(*config, network_of(arguments, *config), std::move(context));
}

MegatronLayout layout_of(const HfConfig& config, int64_t vocab_divisor) {
  return megatron_layout(decoder_config_from_hf(config), vocab_divisor);
}

std::shared_ptr<MultiModalModule> latent_model_of(const LatentFamily& family, const Arguments& arguments,
                                                  const HfConfig* config) {
  require(config != nullptr, family.class_name + " is described by a directory of diffusers: give --hf-model");
  require(arguments.tensor_model_parallel_size == 1 && arguments.expert_model_parallel_size == 1,
          "--tensor-model-parallel-size and --expert-model-parallel-size do not go with " + family.class_name +
              "; leave them out, and FSDP2 shards the model over all ranks");
  auto model = family.make(*config);
  if (arguments.is_given("init_method_std")) model->weight_init().std = arguments.init_method_std;
  return model;
}

}  // namespace

std::shared_ptr<MultiModalModule> make_model(const HfConfig& config, Network network, BuildContext context) {
  require(network.encoder == nullptr || context.tensor_parallel->size() == 1,
          "--tensor-model-parallel-size does not go with vision-language models, whose vision tower is not cut over "
          "ranks; leave it out, and FSDP2 shards the model over all ranks");
  return std::make_shared<DecoderModel>(std::move(network), std::move(context), weight_files_of(config));
}

void register_models(ModelRegistry& registry) {
  registry.add("gpt", model_of);
  for (const auto& family : latent_families()) {
    registry.add(family.class_name, [&family](const Arguments& arguments, const HfConfig* config) {
      return latent_model_of(family, arguments, config);
    });
  }
  for (const auto& family : model_families()) {
    const auto factory = [sees = family.encoder != nullptr](const Arguments& arguments, const HfConfig* config) {
      TORCH_CHECK(config != nullptr || !sees,
                  "a vision-language model is described by a Hugging Face directory: give --hf-model");
      return model_of(arguments, config);
    };
    for (const auto& name : {family.architecture, family.model_type}) {
      registry.add(name, factory);
      if (family.has_megatron_layout) registry.add_layout(name, layout_of);
    }
  }
}

}  // namespace megashard
