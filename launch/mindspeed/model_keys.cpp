#include <algorithm>

#include "launch/mindspeed/mindspeed_keys.h"

namespace megashard {
namespace mindspeed_model {  // unique names: files are compiled together
namespace {

using V = YamlValue;
using R = MindSpeedRun;
using A = Arguments;

constexpr char kHfModel[] = "--hf-model";

void take_id(const V& value, R& run, A&) {
  run.model_id = value.text();
  run.model_place = yaml_place(value.source, value.node) + value.key;
}

/// Megatron core's route names the model there; others its text alone.
void take_decoder_id(const V& value, R& run, A& arguments) {
  const auto name = value.text();
  if (run.model_id.empty() && find_mindspeed_model(name) != nullptr) take_id(value, run, arguments);
}

/// Reads init_from_hf_path of the legacy route, model_name_or_path of the native one.
void take_folder(const V& value, R& run, A& arguments) {
  run.is_from_hf = true;
  run.hf_folder = value.text();
  set_unless_given(kHfModel, value, arguments);
}

void take_frozen(const V& value, R&, A& arguments) {
  const auto patterns = value.list("a list of modules, as in [model.visual]");
  arguments.freeze_modules.insert(arguments.freeze_modules.end(), patterns.begin(), patterns.end());
}

void take_predictions(const V& value, R&, A& arguments) {
  if (value.integer(0) > 0) set_unless_given("--mtp-num-layers", value, arguments);
}

void take_prediction_scale(const V& value, R&, A& arguments) {
  if (!arguments.is_given("mtp_loss_scaling_factor")) arguments.mtp_loss_scaling_factor = value.number();
}

template <std::optional<bool> R::*field>
void take_freeze(const V& value, R& run, A&) {
  run.*field = value.boolean();
}

/// Stores sizes of a network that the file describes, for comparison with config.json.
void take_size(const V& value, R& run, A&) {
  if (value.node.IsScalar() && value.node.Scalar() == "null") return;
  run.sizes[value.key] = value.integer(0);
}

void take_offload(const V& value, R& run, A&) {
  if (value.boolean()) run.offload_modules.emplace_back("model.language_model.layers.{*}");
}

void take_loss(const V& value, R& run, A& arguments) {
  const auto type = value.text();
  run.loss_by_sample = type == "per_sample_loss" ? yaml_place(value.source, value.node) + value.key : "";
  if (!run.loss_by_sample.empty()) return;
  if (type == "per_token_loss") {
    if (!arguments.is_given("calculate_per_token_loss")) arguments.calculate_per_token_loss = true;
  } else if (type != "default" && type != "raw") {
    value.fail(
        "is " + type +
        "; the loss is the mean of a microbatch's tokens (default), of a sample's (per_sample_loss) or of all of "
        "a step's (per_token_loss)");
  }
}

void take_balance(const V& value, R& run, A&) { run.router_aux_loss_coef = value.number(); }

constexpr const char* kSees = "no model of this program has it";

const MindSpeedKey kModel[] = {
    {"model_id", take_id},
    {"init_from_hf_path", take_folder},
    {"model_name_or_path", take_folder},
    {"freeze", take_frozen},
    {"freeze_vision_model", take_freeze<&R::freezes_encoder>},  // Megatron core's route
    {"freeze_vision_projection", take_freeze<&R::freezes_projector>},
    {"freeze_language_model", take_freeze<&R::freezes_decoder>},
    {"mtp_num_layers", take_predictions},
    {"text_encoder", nullptr, "", kSees},
    {"video_encoder", nullptr, "", kSees},
    {"mtp_loss_scaling_factor", take_prediction_scale},
    {"trust_remote_code"},
    {"attn_implementation"},
    {"gdn_implementation"},  // chooses a kernel, not the numbers
    {"causal_conv1d_implementation"},
    {"use_grouped_expert_matmul"},
    {"skip_gdn_recompute"},  // affects memory only
    {"skip_flash_attn_recompute"},
    {"img_context_token_id"},  // defined in config.json
    {"image_token_index"},
    {"vision_start_token_id"},
    {"patch"},
    {"recompute"},  // this and the next three: those of `features` count
    {"recompute_plan"},
    {"enable_chunk_loss"},
    {"chunkloss_plan"},
};

const MindSpeedKey kEncoder[] = {
    {"freeze", take_freeze<&R::freezes_encoder>},
    {"num_layers", take_size},
    {"hidden_size", take_size},
    {"ffn_hidden_size", take_size},
    {"num_attention_heads", take_size},
    {"patch_size", take_size},
    {"out_hidden_size", take_size},
    {"temporal_patch_size"},
    {"pipeline_num_layers"},
};

const MindSpeedKey kProjector[] = {
    {"freeze", take_freeze<&R::freezes_projector>},
};

const MindSpeedKey kAudio[] = {
    {"freeze", take_freeze<&R::freezes_audio>},
};

const MindSpeedKey kDecoder[] = {
    {"model_id", take_decoder_id},
    {"freeze", take_freeze<&R::freezes_decoder>},
    {"activation_offload", take_offload},
    {"num_layers", take_size},
    {"hidden_size", take_size},
    {"ffn_hidden_size", take_size},
    {"num_attention_heads", take_size},
    {"num_query_groups", take_size},
    {"num_moe_experts", take_size},
    {"moe_router_topk", take_size},
    {"moe_ffn_hidden_size", take_size},
    {"pipeline_num_layers"},
    {"recompute_num_layers"},  // affects memory only
};

const MindSpeedKey kLoss[] = {
    {"loss_type", take_loss}, {"router_aux_loss_coef", take_balance}, {"router_aux_loss_offload"},
    {"compute_mode"},  // affects memory only
    {"chunk_size"},
};

const MindSpeedSection kSections[] = {
    {"model", kModel},
    {"model.image_encoder", {}},
    {"model.image_encoder.vision_encoder", kEncoder, UnknownKey::kErrorIfMisspelt},
    {"model.image_encoder.vision_projector", kProjector, UnknownKey::kErrorIfMisspelt},
    {"model.vision_encoder", kEncoder, UnknownKey::kErrorIfMisspelt},  // Mistral 3 has both
    {"model.vision_projector", kProjector, UnknownKey::kErrorIfMisspelt},
    {"model.audio_encoder", {}},
    {"model.audio_encoder.audio_encoder", kAudio, UnknownKey::kErrorIfMisspelt},
    {"model.text_decoder", kDecoder, UnknownKey::kErrorIfMisspelt},
    {"model.loss_cfg", kLoss},
};

const MindSpeedModel kModels[] = {
    {"qwen2_5vl", "qwen2_5_vl", {"model.visual.patch_embed", "model.visual.blocks"}, {"model.visual.merger"}, false},
    {"qwen3_vl",
     "qwen3_vl",
     {"model.visual.patch_embed", "model.visual.blocks", "model.visual.pos_embed"},
     {"model.visual.merger"},
     true},
    {"qwen3_vl_moe",
     "qwen3_vl_moe",
     {"model.visual.patch_embed", "model.visual.blocks", "model.visual.pos_embed"},
     {"model.visual.merger"},
     true},
    {"qwen3_5",
     "qwen3_5",
     {"model.visual.patch_embed", "model.visual.blocks", "model.visual.pos_embed"},
     {"model.visual.merger"},
     false},
    {"qwen3_5_moe",
     "qwen3_5_moe",
     {"model.visual.patch_embed", "model.visual.blocks", "model.visual.pos_embed"},
     {"model.visual.merger"},
     false},
    {"qwen3_omni_moe",
     "qwen3_omni_moe",
     {"model.visual.patch_embed", "model.visual.blocks", "model.visual.merger_list", "model.visual.pos_embed"},
     {"model.visual.merger"},
     true,
     {"model.audio_tower"}},
    {"qwen3_asr", "qwen3_asr", {}, {}, false, {"model.audio_tower"}},
    {"mistral3", "mistral3", {"model.vision_tower"}, {"model.multi_modal_projector"}, false},
    {"internvl", "internvl_chat, internvl", {"model.vision_tower"}, {"model.multi_modal_projector"}, false},
    {"glm4v_moe", "glm4v_moe", {"model.visual.patch_embed", "model.visual.blocks"}, {"model.visual.merger"}, true},
    {"step3_vl", "step_robotics", {"model.vision_model"}, {"model.vit_large_projector"}, false},
    {"kimi_k25", "kimi_k25", {"model.vision_tower"}, {"model.mm_projector"}, false},
    {"wandit", "WanTransformer3DModel", {}, {}, false},
    {"vace", "WanVACETransformer3DModel", {}, {}, false},
    {"ltx2", "LTX2VideoTransformer3DModel", {}, {}, false},
    {"hunyuanvideo15dit", "HunyuanVideo15Transformer3DModel,HunyuanVideo_1_5_DiffusionTransformer", {}, {}, false},
};

}  // namespace
}  // namespace mindspeed_model

std::span<const MindSpeedSection> mindspeed_model_sections() { return mindspeed_model::kSections; }
std::span<const MindSpeedKey> mindspeed_loss_keys() { return mindspeed_model::kLoss; }

std::span<const MindSpeedModel> mindspeed_models() { return mindspeed_model::kModels; }

const MindSpeedModel* find_mindspeed_model(const std::string& id) {
  const auto found = std::find_if(std::begin(mindspeed_model::kModels), std::end(mindspeed_model::kModels),
                                  [&](const auto& each) { return id == each.id; });
  return found == std::end(mindspeed_model::kModels) ? nullptr : found;
}

}  // namespace megashard
