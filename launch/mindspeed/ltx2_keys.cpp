#include "launch/mindspeed/mindspeed_keys.h"

namespace megashard {
namespace mindspeed_ltx2 {  // unique names: files are compiled together
namespace {

using V = YamlValue;
using R = MindSpeedRun;
using A = Arguments;
using D = MindSpeedDiffusion;

template <std::string D::*field>
void take_text(const V& value, R& run, A&) {
  (*run.diffusion).*field = value.text();
}

template <double D::*field>
void take_number(const V& value, R& run, A&) {
  (*run.diffusion).*field = value.number();
}

void take_id(const V& value, R& run, A&) {
  run.model_id = value.text();
  run.model_place = yaml_place(value.source, value.node) + value.key;
}

/// LTX-2 is published as one file; here its folder has a pipeline of diffusers.
void take_weights(const V& value, R& run, A&) {
  const auto path = value.text();
  const auto slash = path.rfind('/');
  const bool is_file = path.ends_with(".safetensors");
  run.diffusion->weights = !is_file ? path : slash == std::string::npos ? "." : path.substr(0, slash);
  run.diffusion->pipeline = run.diffusion->weights;
}

void take_size(const V& value, R& run, A&) { run.sizes[value.key] = value.integer(0); }
void take_sound(const V& value, R& run, A&) { run.diffusion->has_sounds = value.boolean(); }
void take_most(const V& value, R& run, A&) { run.diffusion->most_samples = value.integer(1); }

void take_sampling(const V& value, R& run, A&) {
  run.diffusion->draws_uniformly = value.text() == "uniform";
  if (!run.diffusion->draws_uniformly && value.text() != "shifted_logit_normal")
    value.fail("is " + value.text() +
               ", but timesteps are uniform or logit-normal; write uniform or shifted_logit_normal");
}

constexpr const char* kLine = "the shift grows as LTX-2's, from 0.95 at 1024 patches to 2.05 at 4096";

const MindSpeedKey kModel[] = {
    {"model_id", take_id},
    {"model_name_or_path", take_weights},
    {"checkpoint_path"},    // names the same file
    {"text_encoder_path"},  // features are written before the run
    {"enable_gradient_checkpointing"},
};

const MindSpeedKey kTransformer[] = {
    {"num_layers", take_size},
    {"num_attention_heads", take_size},
    {"attention_head_dim", take_size},
    {"in_channels", take_size},
    {"out_channels", take_size},
    {"cross_attention_dim", take_size},
    {"caption_channels", take_size},
    {"timestep_scale_multiplier", take_size},
    {"positional_embedding_max_pos"},  // config.json says it, and the rest
    {"rope_type"},
};

const MindSpeedKey kDataset[] = {
    {"dataset_type", nullptr, "ltx2_precomputed", "the data of LTX-2 are its trainer's features"},
    {"preprocess_parameters"},
};

const MindSpeedKey kBasic[] = {
    {"dataset_dir", take_text<&D::data_path>},
    {"dataset"},
    {"max_samples", take_most},
};

const MindSpeedKey kCustom[] = {
    {"latents_dir", take_text<&D::videos>},
    {"conditions_dir", take_text<&D::texts>},
    {"audio_latents_dir", take_text<&D::sounds>},
    {"with_audio", take_sound},
    {"fps", take_number<&D::frames_per_second>},
    {"audio_channels"},  // the files have them
    {"audio_mel_bins"},
    {"audio_prompt_key"},
    {"seed"},
    {"first_frame_conditioning_p", nullptr, "0.0,0", "first frames without noise are a matter of the data"},
    {"timestep_sampling_mode", take_sampling},
};

const MindSpeedKey kSampling[] = {
    {"std", take_number<&D::logit_std>},    {"min_tokens", nullptr, "1024", kLine},
    {"max_tokens", nullptr, "4096", kLine}, {"min_shift", nullptr, "0.95", kLine},
    {"max_shift", nullptr, "2.05", kLine},
};

const MindSpeedSection kModelSections[] = {
    {"model", kModel},
    {"model.transformer", kTransformer, UnknownKey::kErrorIfMisspelt},
};

const MindSpeedSection kDataSections[] = {
    {"data", {}},
    {"data.dataset_param", kDataset},
    {"data.dataset_param.basic_parameters", kBasic},
    {"data.dataset_param.ltx2_dataset_custom", kCustom},
    {"data.dataset_param.ltx2_dataset_custom.timestep_sampling_params", kSampling},
    {"data.dataloader_param", {}, UnknownKey::kErrorIfMisspelt},  // samples are shuffled, in runs of one shape
};

}  // namespace
}  // namespace mindspeed_ltx2

std::span<const MindSpeedSection> mindspeed_ltx2_sections() { return mindspeed_ltx2::kModelSections; }
std::span<const MindSpeedSection> mindspeed_ltx2_data_sections() { return mindspeed_ltx2::kDataSections; }

}  // namespace megashard
