#include <c10/util/StringUtil.h>

#include <algorithm>

#include "framework/arguments/argument_value.h"
#include "launch/mindspeed/mindspeed_keys.h"

namespace megashard {
namespace mindspeed_data {  // unique names: files are compiled together
namespace {

using V = YamlValue;
using R = MindSpeedRun;
using A = Arguments;

constexpr char kWorkers[] = "--num-workers";

Preparation& prepared(R& run) { return *run.data; }

template <int64_t Preparation::*field>
void take_integer(const V& value, R& run, A&) {
  prepared(run).*field = value.integer(0);
}

template <bool Preparation::*field>
void take_switch(const V& value, R& run, A&) {
  prepared(run).*field = value.boolean();
}

template <std::string Preparation::*field>
void take_text(const V& value, R& run, A&) {
  prepared(run).*field = value.text();
}

constexpr char kMessages[] = "messages", kImages[] = "images", kAudios[] = "audios", kSystem[] = "system",
               kRole[] = "role", kContent[] = "content", kUser[] = "user", kAssistant[] = "assistant",
               kSystemRole[] = "system_role";

template <const char* column>
void take_column(const V& value, R& run, A&) {
  prepared(run).columns[column] = value.is_null() ? "" : value.text();
}

void take_template(const V& value, R& run, A&) {
  const auto name = prepared(run).turn_template = value.text();
  if (std::ranges::count(turn_templates(), name) == 0)
    value.fail("is " + name + "; conversations are prepared by the templates " + c10::Join(", ", turn_templates()) +
               " here. For another one prepare them by the model's chat template (docs/data.md) and give --data-path");
}

/// InternVL's own form of records, in which <image> stands for the pictures of the key image.
void take_tile_template(const V& value, R& run, A& arguments) {
  take_template(value, run, arguments);
  if (value.text() != "internvl2_5") value.fail("is " + value.text() + "; write internvl2_5");
  prepared(run).columns[kImages] = "image";
  prepared(run).has_tiles = true;
}

/// A setting that config.json has under `key`.
template <const char* key>
void take_setting(const V& value, R& run, A&) {
  run.settings[key] = {value.text(), yaml_place(value.source, value.node) + value.key};
}

/// The steps from a tile to pixels: those that all InternVL models have.
void take_pipeline(const V& value, R&, A&) {
  const YAML::Node steps = value.node.IsMap() ? value.node["image"] : YAML::Node(YAML::NodeType::Undefined);
  if (!steps.IsDefined() || !steps.IsSequence()) value.expected("the list image of steps");
  for (const auto& step : steps) {
    const auto name = step["trans_type"].as<std::string>("");
    const YAML::Node param = step["param"];
    const auto has = [&](const char* key, const std::vector<double>& wanted) {
      return param.IsDefined() && param[key].as<std::vector<double>>(std::vector<double>()) == wanted;
    };
    const bool is_known =
        name == "Pad2Square" || name == "ToTensor" ||
        (name == "Resize" && param["interpolation"].as<std::string>("") == "BICUBIC") ||
        (name == "norm_fun" && has("mean", {0.485, 0.456, 0.406}) && has("std", {0.229, 0.224, 0.225}));
    if (!is_known)
      value.fail(
          "has the step " + (name.empty() ? "without trans_type" : name) +
          "; tiles are resized by BICUBIC and normed by ImageNet's mean and std here (Resize, ToTensor, norm_fun)");
  }
}

constexpr char kPatch[] = "patch_size", kSide[] = "image_size", kRatio[] = "downsample_ratio",
               kDynamic[] = "dynamic_image_size", kThumbnail[] = "use_thumbnail", kLeast[] = "min_dynamic_patch",
               kMost[] = "max_dynamic_patch";

void take_shuffle(const V& value, R&, A& arguments) {
  if (!arguments.is_given("shuffle_conversations")) arguments.shuffle_conversations = value.boolean();
}

std::vector<std::string> files_in(const V& value) {
  auto files = comma_words({value.text()});
  if (files.empty()) value.expected("a file, or several by commas");
  return files;
}

constexpr const char* kPairs = "conversations are prepared as pairs of a question and an answer";
constexpr const char* kNeat = "packed conversations do not see each other here; give neat_packing: true instead";
constexpr const char* kWhole = "a set is prepared as a whole, before the run";

const MindSpeedKey kData[] = {{"val_dataset_param"}};  // read with val_interval alone, which is refused

const MindSpeedKey kDataset[] = {
    {"dataset_type", nullptr, "huggingface,multimodal,qwen3_asr",
     "only conversations (huggingface, multimodal, qwen3_asr) are read"},
    // The type multimodal, which is InternVL's, has these.
    {"template_name", take_tile_template},
    {"use_text_processer"},
    {"patch_size", take_setting<kPatch>},
    {"image_size", take_setting<kSide>},
    {"down_sample_ratio", take_setting<kRatio>},
    {"dynamic_image_size", take_setting<kDynamic>},
    {"use_thumbnail", take_setting<kThumbnail>},
    {"min_dynamic_patch", take_setting<kLeast>},
    {"max_dynamic_patch", take_setting<kMost>},
    {"group_by_length"},  // leaves padding out, which is never learnt
    {"min_num_frame"},    // is about videos, which preparation refuses
    {"max_num_frame"},
    {"sampling_method"},
};

const MindSpeedKey kTokenizer[] = {
    {"from_pretrained", take_text<&Preparation::model>},
    {"add_eos_token", nullptr, "false", "the template ends the turns"},
    {"hub_backend"},
    {"autotokenizer_name"},
    {"use_fast"},
};

const MindSpeedKey kAttributes[] = {
    {"packing", nullptr, "false", kNeat},
    {"ranking", nullptr, "false", "there is no training on preferences"},
    {"pretrain", nullptr, "false", "text is prepared by preprocess_data.py without --input-format; give --data-path"},
    {"formatting", nullptr, "sharegpt", kPairs},
    {"messages", take_column<kMessages>},
    {"images", take_column<kImages>, "", "", true},
    {"system", take_column<kSystem>, "", "", true},
    {"role_tag", take_column<kRole>},
    {"content_tag", take_column<kContent>},
    {"user_tag", take_column<kUser>},
    {"assistant_tag", take_column<kAssistant>},
    {"system_tag", take_column<kSystemRole>, "", "", true},
    {"videos", nullptr, "", "videos are prepared by the model's chat template alone (docs/data.md): give --data-path"},
    {"audios", take_column<kAudios>, "", "", true},
    {"tools", nullptr, "", "tools are prepared by the model's chat template alone (docs/data.md): give --data-path"},
    {"observation_tag"},  // preparation refuses records with such a turn
    {"function_tag"},
    {"chosen"},
    {"rejected"},
    {"prompt"},
    {"query"},
    {"response"},
    {"history"},
};

const MindSpeedKey kPreprocessing[] = {
    {"model_name_or_path", take_text<&Preparation::model>},
    {"image_max_pixels", take_integer<&Preparation::image_max_pixels>},
    {"image_min_pixels", take_integer<&Preparation::image_min_pixels>},
    {"train_pipeline", take_pipeline},
    {"image_reader_type"},
    {"split_special_tokens", nullptr, "false", "special tokens in the text stay whole"},
    {"image_do_pan_and_scan", nullptr, "false", "no model here has it"},
    {"crop_to_patches", nullptr, "false", "no model here has it"},
    {"use_audio_in_video", nullptr, "false", "videos are prepared by the model's chat template alone (docs/data.md)"},
    {"fix_mistral_regex", take_switch<&Preparation::fix_mistral_regex>},
    {"use_fast_tokenizer"},
    {"trust_remote_code"},
    {"image_resolution"},
    {"video_resolution"},
    {"video_max_pixels"},  // videos are refused
    {"video_min_pixels"},
    {"video_fps"},
    {"video_maxlen"},
    {"audio_sampling_rate"},
};

const MindSpeedKey kBasic[] = {
    {"template", take_template},
    {"dataset", [](const V& value, R& run, A&) { prepared(run).inputs = files_in(value); }},
    {"dataset_dir", take_text<&Preparation::image_folder>},
    {"data_path", [](const V& value, R& run, A&) { prepared(run).inputs = files_in(value); }},  // multimodal
    {"data_folder", take_text<&Preparation::image_folder>},
    {"repeat_time", nullptr, "1, 1.0", "samples are drawn once an epoch"},
    {"cache_dir", take_text<&Preparation::cache_folder>},
    {"cutoff_len",
     [](const V& value, R& run, A&) {
       if (!run.is_native) value.fail("is not read by MindSpeed-MM either; write seq_length");
       prepared(run).cutoff_length = value.integer(1);
     }},
    {"train_on_prompt", take_switch<&Preparation::learn_questions>},
    {"mask_history", take_switch<&Preparation::mask_history>},
    {"max_samples", [](const V& value, R& run, A&) { prepared(run).max_samples = value.integer(1); }},
    {"preprocessing_num_workers", take_integer<&Preparation::workers>},
    {"val_dataset",
     [](const V& value, R& run, A&) {
       if (!run.validation) run.validation.emplace();
       run.validation->inputs = files_in(value);
     }},
    {"val_max_samples",
     [](const V& value, R& run, A&) {
       const int64_t most = value.integer(0);  // 0: all
       if (!run.validation) run.validation.emplace();
       if (most > 0) run.validation->max_samples = most;
     }},
    {"val_rate",
     [](const V& value, R& run, A&) {
       run.validation_share = value.number();
       if (!(run.validation_share >= 0 && run.validation_share < 1)) value.expected("a number from 0 to below 1");
     }},
    {"stage", nullptr, "sft", kPairs},
    {"packing", nullptr, "false", kNeat},
    {"neat_packing",
     [](const V& value, R&, A& arguments) {
       if (!arguments.is_given("neat_packing")) arguments.neat_packing = value.boolean();
     }},
    {"streaming", nullptr, "false", kWhole},
    {"async_preprocess", nullptr, "false", kWhole},
    {"use_pmcc_data", nullptr, "false", "records are read by their columns"},
    {"tool_format", nullptr, "", "tools are prepared by the model's chat template alone (docs/data.md)"},
    {"preprocess_on_fly"},  // the same samples
    {"async_preprocess_buffer_size"},
    {"enable_thinking", [](const V& value, R& run, A&) { prepared(run).disable_thinking = !value.boolean(); }},
    {"overwrite_cache"},
    {"preprocessing_batch_size"},
};

const MindSpeedKey kLoader[] = {
    {"num_workers", mindspeed_flag<kWorkers>},
    {"shuffle", take_shuffle},
    {"dataloader_mode", nullptr, "sampler", "samples are drawn by a sampler"},
    {"sampler_type", nullptr, "BaseRandomBatchSampler", "samples are drawn one after the other, or in a random order"},
    {"drop_last", nullptr, "true", "batches are always full"},
    {"pin_memory"},
    {"enable_preload"},
    {"group_data"},
};

const MindSpeedKey kCollation[] = {
    {"ignore_pad_token_for_loss", nullptr, "true", "padding is never learnt"},
    {"model_name"},
    {"collator_id"},
    {"pad_to_multiple_of"},
    {"pad_id"},
};

const MindSpeedSection kSections[] = {
    {"data", kData},
    {"data.dataset_param", kDataset},
    {"data.dataset_param.attr", kAttributes},
    {"data.dataset_param.preprocess_parameters", kPreprocessing},
    {"data.dataset_param.tokenizer_config", kTokenizer},
    {"data.dataset_param.basic_parameters", kBasic},
    {"data.dataloader_param", kLoader},
    {"data.dataloader_param.collate_param", kCollation},
};

}  // namespace
}  // namespace mindspeed_data

const std::vector<std::string>& turn_templates() {
  static const std::vector<std::string> names{
      "qwen2vl",  "qwen3_vl_nothink", "mistral",    "glm4v_moe",          "kimi_k25",
      "step3_vl", "internvl2_5",      "qwen3_omni", "qwen3_omni_nothink", "qwen3_asr"};
  return names;
}

std::span<const MindSpeedSection> mindspeed_data_sections() { return mindspeed_data::kSections; }

}  // namespace megashard
