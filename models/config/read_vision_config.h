#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/hugging_face/hf_config.h"
#include "models/config/read_decoder_config.h"
#include "models/config/vision_config.h"

namespace megashard {

/// The text model's part of config.json. Older files have its keys at the top level, newer ones in text_config. Throws
/// if both differ.
HfConfig text_config(const HfConfig& root);
/// The tower's part of config.json. Throws if there is none.
HfConfig vision_config(const HfConfig& root);

/// read_decoder of the text model. Throws if position parameters at the top level differ from its own.
DecoderConfig read_text(const HfConfig& root, const DecoderDefaults& defaults);

/// Throws unless rows and columns can each turn quarters of a head. `key`: that of the number of heads.
void check_turned_heads(const HfConfig& config, const VisionConfig& vision, const char* key);
/// Reads the sizes of a tower of images in the keys of transformers' Pixtral and SigLIP; `tower` has the defaults.
/// Throws for dropout.
VisionConfig read_image_tower(const HfConfig& config, VisionConfig tower);
/// Reads the fields of all generations of Qwen's towers; `vision` has the defaults of one.
void read_tower(const HfConfig& config, VisionConfig& vision, const char* activation);
/// The tower of Qwen3-VL and Qwen3.5, whose classes begin with `prefix`; the latter without deepstack_visual_indexes.
VisionConfig read_qwen3_tower(const HfConfig& config, const std::string& prefix);
/// Reads a list of the tower's blocks.
std::vector<int64_t> read_blocks(const HfConfig& config, const char* key, std::vector<int64_t> fallback, int64_t depth);

/// Connects tower and decoder. `model`: class of the module that contains both; `image_token_id`: the default, which
/// videos follow. Throws if their sizes do not fit.
VisionLanguageConfig connect_vision(const HfConfig& root, VisionConfig vision, const DecoderConfig& text,
                                    const char* model, int64_t image_token_id = 151655);

}  // namespace megashard
