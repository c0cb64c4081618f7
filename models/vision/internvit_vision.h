#pragma once

#include "models/config/vision_config.h"
#include "models/network/encoder.h"

namespace megashard {

/// What differs between InternVL's towers, besides sizes.
struct InternVitSpec {
  NormKind norm = NormKind::kLayerNorm;
  bool qkv_bias = false;
  bool qk_norm = false;      ///< RMSNorms of all heads of queries, and of keys
  double first_scale = 0.1;  ///< initial value of the vectors that multiply the branches
  double drop_path = 0;      ///< TowerLayerSpec::drop_path of the last layer
  Activation projector_activation = Activation::kGelu;
  bool chat_files = false;  ///< files have the names of InternVLChatModel's layers
};

/// The encoder of InternVL: `vision_tower`, InternViT, and `multi_modal_projector`. Pictures are tiles of one size; a
/// class token stands before the patches of each, whose states are left out.
EncoderSpecPtr internvit_vision(VisionLanguageConfig config, InternVitSpec spec);

}  // namespace megashard
