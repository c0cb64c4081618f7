#pragma once

#include "models/families/model_family.h"
#include "models/vision/internvit_vision.h"

namespace megashard {

/// The decoder of InternVL's config.json, one of Qwen's; `part`: the key of its object.
DecoderConfig read_internvl_text(const HfConfig& root, const char* part);

/// Keys of vision_config that transformers' form and the published one name differently.
struct InternVitKeys {
  const char *bias, *qk_norm, *dropout, *first_scale;
};

/// The encoder; `spec`: what these keys do not say.
EncoderSpecPtr read_internvit(const HfConfig& root, const DecoderConfig& text, const InternVitKeys& keys,
                              int64_t image_token, InternVitSpec spec);

}  // namespace megashard
