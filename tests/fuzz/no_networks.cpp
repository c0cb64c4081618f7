// The targets read files in one process and build no network: the functions that only networks and ranks need.
#include <c10/util/Exception.h>

#include "models/audio/audio_encoder.h"
#include "models/diffusion/latent_families.h"
#include "models/layers/gated_delta_net.h"
#include "models/layers/kimi_delta_attention.h"
#include "models/layers/layer_inputs.h"
#include "models/layers/mamba2.h"
#include "models/layers/short_conv.h"
#include "models/moe/normed_router.h"
#include "models/network/network.h"
#include "models/vision/glm_vision.h"
#include "models/vision/internvit_vision.h"
#include "models/vision/moon_vision.h"
#include "models/vision/pixtral_vision.h"
#include "models/vision/qwen_vision.h"
#include "models/vision/siglip_vision.h"
#include "models/vision/step_vision.h"
#include "parallel/collectives/agreement.h"

namespace megashard {

LayerSpec decoder_layer(const DecoderConfig& /*config*/, int64_t /*index*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

Network decoder_network(DecoderConfig /*config*/, const DescribeLayer& /*layer*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

void for_each_part(const Network& /*network*/, const std::function<void(const PartSpec&)>& /*visit*/) {}

NormSpec hidden_norm(const DecoderConfig& /*config*/) { TORCH_INTERNAL_ASSERT(false, "a target builds a network"); }

MlpSpec mlp_of(const DecoderConfig& /*config*/, int64_t /*intermediate_size*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

MoeSpec moe_of(const DecoderConfig& /*config*/, RouterSpecPtr /*router*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

PartSpecPtr experts_part(MoeSpec /*spec*/) { TORCH_INTERNAL_ASSERT(false, "a target builds a network"); }

RouterSpecPtr normed_router(std::string /*class_name*/, NormSpec /*norm*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

PartSpecPtr layer_input_part(LayerInputSpec /*spec*/) { TORCH_INTERNAL_ASSERT(false, "a target builds a network"); }

PartSpecPtr gated_delta_net_part(GatedDeltaNetSpec /*spec*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

PartSpecPtr kimi_delta_attention_part(KimiDeltaAttentionSpec /*spec*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

PartSpecPtr mamba2_part(Mamba2Spec /*spec*/) { TORCH_INTERNAL_ASSERT(false, "a target builds a network"); }

PartSpecPtr short_conv_part(ShortConvSpec /*spec*/) { TORCH_INTERNAL_ASSERT(false, "a target builds a network"); }

EncoderSpecPtr glm_vision(VisionLanguageConfig /*config*/, int64_t /*merger_width*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

EncoderSpecPtr internvit_vision(VisionLanguageConfig /*config*/, InternVitSpec /*spec*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

EncoderSpecPtr moon_vision(VisionLanguageConfig /*config*/, double /*projector_norm_eps*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

EncoderSpecPtr pixtral_vision(VisionLanguageConfig /*config*/, ProjectorSpec /*projector*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

EncoderSpecPtr join_encoders(std::vector<EncoderSpecPtr> /*specs*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

EncoderSpecPtr audio_encoder(AudioConfig /*config*/) { TORCH_INTERNAL_ASSERT(false, "a target builds a network"); }

EncoderSpecPtr qwen_vision(VisionLanguageConfig /*config*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

EncoderSpecPtr siglip_vision(VisionLanguageConfig /*config*/, NormSpec /*projector_norm*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

EncoderSpecPtr step_vision(VisionLanguageConfig /*config*/, StepVisionSpec /*spec*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

const LatentFamily* latent_family_of(const nlohmann::ordered_json& /*config*/) { return nullptr; }

void check_settings(const LatentFamily& /*family*/, const HfConfig& /*config*/) {
  TORCH_INTERNAL_ASSERT(false, "a target builds a network");
}

std::vector<std::string> gather_or_throw(const ProcessGroupPtr& /*group*/,
                                         const std::function<std::string()>& /*work*/) {
  TORCH_INTERNAL_ASSERT(false, "a target has ranks");
}

void all_or_throw(const ProcessGroupPtr& /*group*/, const std::function<void()>& /*work*/) {
  TORCH_INTERNAL_ASSERT(false, "a target has ranks");
}

}  // namespace megashard
