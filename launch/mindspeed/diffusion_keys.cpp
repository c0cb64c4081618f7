#include <filesystem>

#include "framework/arguments/argument_value.h"
#include "launch/mindspeed/mindspeed_keys.h"

namespace megashard {
namespace mindspeed_diffusion {  // unique names: files are compiled together
namespace {

using V = YamlValue;
using R = MindSpeedRun;
using A = Arguments;
using D = MindSpeedDiffusion;

template <std::string D::*field>
void take_text(const V& value, R& run, A&) {
  (*run.diffusion).*field = value.text();
}

template <int64_t D::*field>
void take_integer(const V& value, R& run, A&) {
  (*run.diffusion).*field = value.integer(1);
}

template <double D::*field>
void take_number(const V& value, R& run, A&) {
  (*run.diffusion).*field = value.number();
}

/// A part of a pipeline of diffusers: the first key that names one decides.
void take_part(const V& value, R& run, A&) {
  if (!run.diffusion->pipeline.empty()) return;
  auto part = std::filesystem::path(value.text()).lexically_normal();
  if (part.extension() == ".safetensors") part = part.parent_path();
  if (!part.has_filename()) part = part.parent_path();
  run.diffusion->pipeline = part.has_parent_path() ? part.parent_path().string() : ".";
}

void take_tokenizers(const V& value, R& run, A& arguments) {
  if (!value.node.IsSequence()) value.expected("a list, or a map");
  for (size_t i = 0; i < value.node.size(); ++i) {
    const YAML::Node folder = value.node[i]["from_pretrained"], length = value.node[i]["model_max_length"];
    if (folder.IsDefined()) take_part({value.source, value.key + ".from_pretrained", folder}, run, arguments);
    if (length.IsDefined())
      take_integer<&D::text_length>({value.source, value.key + ".model_max_length", length}, run, arguments);
  }
}

void take_noise(const V& value, R& run, A&) {
  run.diffusion->is_hunyuan = value.text() == "hunyuanvideo_15_diffusion";
  if (!run.diffusion->is_hunyuan && value.text() != "wan_flow_match_scheduler")
    value.fail("is " + value.text() +
               ", but the noise is that of Wan or HunyuanVideo 1.5; write "
               "wan_flow_match_scheduler or hunyuanvideo_15_diffusion");
}

void take_snr(const V& value, R& run, A&) {
  run.diffusion->draws_uniformly = value.text() == "uniform";
  if (!run.diffusion->draws_uniformly && value.text() != "lognorm")
    value.fail("is " + value.text() + ", but timesteps are uniform or logit-normal; write lognorm");
}

void take_size(const V& value, R& run, A&) { run.sizes[value.key] = value.integer(0); }

void take_id(const V& value, R& run, A&) {
  run.model_id = value.text();
  run.model_place = yaml_place(value.source, value.node) + value.key;
}

constexpr const char* kLatents = "latents are normalised by the VAE's own mean and deviation";
constexpr const char* kOwn = "the model is HunyuanVideo 1.5 as it was published";
constexpr const char* kTable = "the table of noise levels begins at 1 and has 1000 of them";

const MindSpeedKey kModel[] = {
    {"load_video_features"},  // the data section says it
    {"load_text_features"},
    {"task", take_text<&D::task>},
    {"text_encoder", take_tokenizers},  // a list of encoders
    {"encoder_offload_interval"},       // features are written before the run
    {"enable_encoder_dp"},
    {"patch"},
    {"dpo", nullptr, "", "there are no preferences of videos"},
};

const MindSpeedKey kNoise[] = {
    {"model_id", take_noise},
    {"num_train_timesteps", nullptr, "1000", kTable},
    {"sigma_min", nullptr, "0.0,0", kTable},
    {"sigma_max", nullptr, "1.0,1", kTable},
    {"extra_one_step", nullptr, "true", kTable},
    {"inverse_timesteps", nullptr, "false", kTable},
    {"reverse_sigmas", nullptr, "false", kTable},
    {"shift", take_number<&D::shift>},
    {"train_timestep_shift", take_number<&D::training_shift>},
    {"snr", take_snr},
    {"sp_size", nullptr, "1", "give --context-parallel-size"},
    {"dp_replicate", nullptr, "1", "give sharding_size in the FSDP2 file"},
    {"min_timestep_boundary", take_number<&D::first_share>},
    {"max_timestep_boundary", take_number<&D::last_share>},
    {"guidance_scale"},  // for sampling
    {"reverse"},
    {"solver"},
    {"num_inference_timesteps"},
};

const MindSpeedKey kPredictor[] = {
    {"model_id", take_id},
    {"from_pretrained", take_text<&D::weights>},
    {"num_layers", take_size},
    {"ffn_dim", take_size},
    {"freq_dim", take_size},
    {"text_dim", take_size},
    {"num_heads", take_size},
    {"in_dim", take_size},
    {"out_dim", take_size},
    {"mm_double_blocks_depth", take_size},  // HunyuanVideo 1.5
    {"out_channels", take_size},
    {"text_states_dim", take_size},
    {"text_states_dim_2"},  // null
    {"vision_states_dim", take_size},
    {"mm_single_blocks_depth", nullptr, "0", kOwn},
    {"guidance_embed", nullptr, "false", kOwn},
    {"use_meanflow", nullptr, "false", kOwn},
    {"glyph_byT5_v2", nullptr, "true", kOwn},
    {"text_projection", nullptr, "single_refiner", kOwn},
    {"attn_mode", nullptr, "flash,flash2,flash3,torch", "attention is not sparse"},
    {"in_channels"},  // without the conditions, which config.json counts
    {"concat_condition"},
    {"vace_dit"},  // config.json describes it, and the rest
    {"hidden_size"},
    {"patch_size"},
    {"img_dim"},
    {"text_len"},
    {"eps"},
    {"model_type"},
    {"qk_norm"},
    {"qk_norm_type"},
    {"cross_attn_norm"},
    {"max_seq_len"},  // sizes the rotation's table
    {"pipeline_num_layers"},
    {"seperated_timestep"},  // clean frames of the data have the timestep 0
};

const MindSpeedKey kEncoder[] = {
    {"from_pretrained", take_part},
    {"norm_latents", nullptr, "true", kLatents},
    {"norm_mode", nullptr, "channel_specified_shift_scale", kLatents},
    {"do_sample", nullptr, "false", "latents are the mean of the VAE's distribution"},
};

const MindSpeedKey kDataset[] = {
    {"dataset_type", take_text<&D::dataset_type>},
    {"tokenizer_config", take_tokenizers},
    {"use_text_processer"},
    {"enable_text_preprocessing"},
    {"text_preprocess_methods"},  // diffusers' pipeline cleans captions
};

const MindSpeedKey kTokenizer[] = {
    {"from_pretrained", take_part},
    {"model_max_length", take_integer<&D::text_length>},
};

const MindSpeedKey kBasic[] = {
    {"data_path", take_text<&D::data_path>},
    {"data_folder", take_text<&D::data_folder>},
    {"data_storage_mode", nullptr, "combine", "a data.txt has a line FOLDER,FILE for each file of records"},
};

const MindSpeedKey kPreprocessing[] = {
    {"num_frames", take_integer<&D::frames>},
    {"min_num_frames"},
    {"max_hxw"},  // videos are cut to max_height and max_width
    {"hw_stride"},
    {"vae_stride"},
    {"vae_patch_size"},
    {"max_height", take_integer<&D::rows>},
    {"max_width", take_integer<&D::columns>},
    {"train_fps", take_number<&D::frames_per_second>},
    {"cfg", nullptr, "0.0,0", "captions are dropped by --caption-dropout-rate"},
    {"speed_factor", nullptr, "1.0,1", "videos keep their speed"},
    {"frame_interval", nullptr, "1", "give train_fps"},
};

const MindSpeedSection kModelSections[] = {
    {"model", kModel},
    {"model.diffusion", kNoise},
    {"model.predictor", kPredictor, UnknownKey::kErrorIfMisspelt},
    {"model.ae", kEncoder, UnknownKey::kErrorIfMisspelt},
    {"model.text_encoder", kEncoder, UnknownKey::kErrorIfMisspelt},
};

const MindSpeedSection kDataSections[] = {
    {"data", {}},
    {"data.dataset_param", kDataset},
    {"data.dataset_param.tokenizer_config", kTokenizer, UnknownKey::kErrorIfMisspelt},
    {"data.dataset_param.basic_parameters", kBasic},
    {"data.dataset_param.preprocess_parameters", kPreprocessing, UnknownKey::kErrorIfMisspelt},
    {"data.dataloader_param", {}, UnknownKey::kErrorIfMisspelt},  // samples are shuffled, in runs of one shape
};

}  // namespace
}  // namespace mindspeed_diffusion

std::span<const MindSpeedSection> mindspeed_diffusion_sections() { return mindspeed_diffusion::kModelSections; }
std::span<const MindSpeedSection> mindspeed_feature_sections() { return mindspeed_diffusion::kDataSections; }

}  // namespace megashard
