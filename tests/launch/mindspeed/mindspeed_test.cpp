#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "launch/arguments/command_line.h"
#include "launch/mindspeed/mindspeed_keys.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr const char* kData = R"(
  dataset_param:
    dataset_type: huggingface
    attr: {system: null, images: images, messages: messages, role_tag: role, content_tag: content, user_tag: user,
           assistant_tag: assistant, system_tag: null}
    preprocess_parameters: {model_name_or_path: hf, image_max_pixels: 262144, image_min_pixels: 0}
    basic_parameters: {template: qwen2vl, dataset_dir: pictures, dataset: chats.json, cache_dir: cache,
                       preprocessing_num_workers: 16, max_samples: 50, packing: false, neat_packing: true}
  dataloader_param: {dataloader_mode: sampler, drop_last: true, sampler_type: BaseRandomBatchSampler, shuffle: false,
                     collate_param: {model_name: qwen2vl, ignore_pad_token_for_loss: true}}
)";
constexpr const char* kNative = R"(
parallel:
  fully_shard_parallel_size: auto
  fsdp_plan: {apply_modules: ["model.language_model.layers.{*}"], param_dtype: bf16, reduce_dtype: fp32}
model: {model_id: qwen3_vl_moe, model_name_or_path: hf, freeze: [model.visual]}
features:
  loss_cfg: {loss_type: default, router_aux_loss_coef: 0.0}
  recompute: true
  recompute_plan: {apply_modules: ["model.visual.blocks.{*}"]}
  activation_offload_plan: {apply_modules: ["model.language_model.layers.{*}"]}
training:
  micro_batch_size: 2
  gradient_accumulation_steps: 3
  lr: 1.0e-5
  lr_decay_style: cosine
  lr_warmup_ratio: 0.25
  weight_decay: 0.5
  train_iters: 10
  clip_grad: 0.0
  init_model_with_meta_device: true
  optimizer: adamw
  lora: {enable: false, rank: 0}
tools: {profile: {enable: false}}
)";

class MindSpeed : public testing::Test {
 protected:
  MindSpeed() : folder_(fs::temp_directory_path() / ("mindspeed_" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
  }
  ~MindSpeed() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) const {
    const auto path = (folder_ / name).string();
    std::ofstream(path) << text;
    return path;
  }

  static CommandLine parse(std::vector<std::string> words) {
    words.insert(words.begin(), "pretrain");
    std::vector<const char*> argv;
    for (const auto& word : words) argv.push_back(word.c_str());
    return parse_arguments(static_cast<int>(argv.size()), argv.data());
  }

  /// The mistakes found in a command line.
  static std::string refusal(const std::vector<std::string>& words) {
    return usage_error([&] { parse(words).mistakes.throw_if_any(); });
  }

  struct Applied {
    CommandLine line;
    std::string told;
  };
  static Applied apply(const std::vector<std::string>& words, int64_t ranks = 4) {
    Applied applied{parse(words), ""};
    applied.line.mistakes.throw_if_any();
    CollectedDiagnostics told;
    Mistakes ignored;  // would say that the data are not prepared
    apply_mindspeed(
        *applied.line.mindspeed, applied.line.arguments, ranks, [] { return 100; }, told.sink(), ignored);
    applied.told = told.text();
    return applied;
  }

  static std::string refusal_when_applied(const std::vector<std::string>& words) {
    auto line = parse(words);
    Mistakes mistakes;
    const auto quiet = [](Severity, const std::string&) {};
    apply_mindspeed(
        *line.mindspeed, line.arguments, 4, [] { return 100; }, quiet, mistakes);
    return usage_error([&] { mistakes.throw_if_any(); });
  }

  fs::path folder_;
};

TEST_F(MindSpeed, JsonFilesAreSections) {
  const auto data = write("data.json", "{\"dataset_param\": {\"basic_parameters\": {\"template\": \"qwen2vl\",\n"
                                       "\t\"dataset\": \"a.json,b.json\"}, \"preprocess_parameters\": "
                                       "{\"model_name_or_path\": \"hf\"}}}");
  const auto model = write("model.json", "{\"model_id\": \"qwen2_5vl\", \"image_encoder\": {\"vision_encoder\": "
                                         "{\"num_layers\": 32, \"window_attn_size\": 112}, \"vision_projector\": "
                                         "{\"freeze\": true}}, \"text_decoder\": {\"num_layers\": 80}}");
  const auto [line, told] = apply({"--mm-data", data, "--mm-model", model, "--mm-tool", "tools.json", "--seq-length",
                                   "16", "--vocab-size", "152064", "--tokenizer-type", "NullTokenizer"});
  EXPECT_EQ(line.arguments.hf_model, "hf");
  EXPECT_THAT(line.arguments.freeze_modules,
              ElementsAre("model.visual.patch_embed", "model.visual.blocks", "model.visual.merger"))
      << "the tower is frozen where nothing is said";
  EXPECT_EQ(line.mindspeed->sizes.at("text_decoder.num_layers"), 80);
  EXPECT_EQ(line.mindspeed->data->cutoff_length, 16) << "--seq-length";
  EXPECT_THAT(line.mindspeed->data->inputs, ElementsAre("a.json", "b.json"));
  EXPECT_THAT(line.arguments.data_path, ElementsAre("a"));
  EXPECT_EQ(line.arguments.eval_iters, 0);
  EXPECT_FALSE(line.arguments.is_given("vocab_size"));
  EXPECT_THAT(told, HasSubstr("because config.json describes the model: --vocab-size, --tokenizer-type"));
  EXPECT_THAT(told, HasSubstr("image_encoder.vision_encoder.window_attn_size"));
}

TEST_F(MindSpeed, SectionsStandBesideGptArgs) {
  const auto file = write("a.yaml", std::string("gpt_args: {seq_length: 32}\ndata:") + kData +
                                        "model:\n  model_id: qwen3_vl\n  init_from_hf_path: other\n  image_encoder: "
                                        "{vision_encoder: {num_layers: 27, freeze: true}, vision_projector: {freeze: "
                                        "false}}\n  text_decoder: {freeze: false, activation_offload: true}\n  "
                                        "loss_cfg: {loss_type: per_token_loss}\n  mtp_num_layers: 2\n  "
                                        "mtp_loss_scaling_factor: 0.3\n");
  const auto [line, told] = apply({file});
  EXPECT_EQ(line.arguments.hf_model, "other");
  EXPECT_TRUE(line.arguments.calculate_per_token_loss);
  EXPECT_EQ(line.arguments.mtp_num_layers, 2);
  EXPECT_EQ(line.arguments.mtp_loss_scaling_factor, 0.3);
  EXPECT_FALSE(line.arguments.shuffle_conversations);
  EXPECT_TRUE(line.arguments.neat_packing);
  EXPECT_THAT(line.arguments.freeze_modules,
              ElementsAre("model.visual.patch_embed", "model.visual.blocks", "model.visual.pos_embed"));
  const Preparation& data = *line.mindspeed->data;
  EXPECT_EQ(data.image_max_pixels, 262144);
  EXPECT_EQ(data.image_min_pixels, 0);
  EXPECT_EQ(data.image_folder, "pictures");
  EXPECT_EQ(data.columns.at("system_role"), "") << "null is no role";
  EXPECT_EQ(data.columns.at("messages"), "messages");
  EXPECT_EQ(data.prefix(), "cache/chats");
  EXPECT_FALSE(data.strip_text);
  Fsdp2Config config;
  apply_mindspeed(*line.mindspeed, config);
  EXPECT_THAT(config.recompute_modules, ElementsAre("model.visual.blocks.{*}", "model.language_model.layers.{*}"))
      << "MindSpeed-MM's class does so by itself";
  EXPECT_THAT(config.offload_modules, ElementsAre("model.language_model.layers.{*}"));
}

TEST_F(MindSpeed, TheNativeFileMeansTheSameBothWays) {
  const auto file = write("native.yaml", std::string(kNative) + "data:" + kData);
  const auto flag = apply({"--fsdp2-config-path", file});
  for (const auto& [line, told] : {apply({file}), apply({"--config", file}), flag}) {
    const Arguments& arguments = line.arguments;
    EXPECT_EQ(arguments.fsdp2_config_path, file);
    EXPECT_TRUE(arguments.use_torch_fsdp2);
    EXPECT_EQ(arguments.ckpt_format, CheckpointFormat::kTorchDcp);
    EXPECT_EQ(arguments.global_batch_size, 2 * 3 * 4);
    EXPECT_EQ(arguments.train_iters, 10);
    EXPECT_EQ(arguments.lr_warmup_iters, 2) << "int(10 * 0.25)";
    EXPECT_EQ(arguments.clip_grad, 0);
    EXPECT_EQ(arguments.seed, 42) << "its default";
    EXPECT_EQ(arguments.log_interval, 1);
    EXPECT_EQ(arguments.lora_r, std::nullopt) << "not enabled";
    EXPECT_EQ(arguments.save_interval, std::nullopt);
    EXPECT_THAT(arguments.freeze_modules, ElementsAre("model.visual"));
    EXPECT_THAT(arguments.param_group_overrides, ElementsAre("*:wd_mult=1")) << "its AdamW decays all";
    EXPECT_TRUE(arguments.from_scratch);
    EXPECT_THAT(told, HasSubstr("the weights are drawn, not those of model_name_or_path"));
    EXPECT_TRUE(line.mindspeed->data->strip_text);
    Fsdp2Config config;
    apply_mindspeed(*line.mindspeed, config);
    EXPECT_THAT(config.recompute_modules, ElementsAre("model.visual.blocks.{*}"));
    EXPECT_FALSE(config.use_reentrant);
    EXPECT_THAT(config.offload_modules, IsEmpty()) << "not enabled";
  }
  const auto [line, told] = apply({file, "--lr", "1", "--hf-model", "mine", "--train-iters", "7"});
  EXPECT_EQ(line.arguments.lr, 1) << "flags win";
  EXPECT_EQ(line.arguments.train_iters, 7);
  EXPECT_EQ(line.arguments.hf_model, "mine");
  EXPECT_FALSE(line.arguments.from_scratch);
  EXPECT_THAT(told, Not(HasSubstr("are drawn")));
}

TEST_F(MindSpeed, LoadIsACheckpointOrHuggingFaceWeights) {
  const std::string hf = folder_.string();
  const auto file = [&](const std::string& training) {
    return write("load.yaml", "model: {model_id: qwen3_5_moe, model_name_or_path: other}\n"
                              "training: {init_model_with_meta_device: true, no_save_optim: true, no_save_rng: true, "
                              "load: " +
                                  hf + ", save: out" + training + "}\n");
  };
  EXPECT_EQ(apply({file(""), "--mock-data"}).line.arguments.load, hf) << "there are no weights in it";
  EXPECT_THAT(refusal_when_applied({file(", load_format: hf"), "--mock-data"}),
              HasSubstr("load_format is hf, but " + hf + " has no model.safetensors; write auto"));
  write("model.safetensors", "");
  const auto [line, told] = apply({file(""), "--mock-data"});
  EXPECT_EQ(line.arguments.load, std::nullopt);
  EXPECT_EQ(line.arguments.hf_model, hf);
  EXPECT_FALSE(line.arguments.from_scratch);
  EXPECT_THAT(told, HasSubstr("described by config.json of training.load, " + hf + ", and not of model_name_or_path"));
  EXPECT_THAT(told, HasSubstr("save_format auto would save Hugging Face files in MindSpeed-MM"));
  EXPECT_THAT(apply({file(", save_format: dcp"), "--mock-data"}).told, Not(HasSubstr("save_format")));
  const auto flags = apply({file(""), "--mock-data", "--hf-model", "mine"});
  EXPECT_EQ(flags.line.arguments.hf_model, "mine");
  EXPECT_THAT(flags.told, HasSubstr("training.load " + hf + " is not read"));
  EXPECT_EQ(apply({file(""), "--mock-data", "--load", "steps"}).line.arguments.load, "steps");
}

TEST_F(MindSpeed, AQuantisationPlanIsFp8OfItsModules) {
  const auto file = write("fp8.yaml", "model: {model_name_or_path: hf}\ntraining:\n  quantization_plan:\n    "
                                      "recipe_name: mxfp8\n    apply_modules: [\"model.layers.{*}\"]\n    "
                                      "ignored_modules: [\"*gate\"]\n    quant_converters: [quantize.linear.mx]\n");
  const auto [line, told] = apply({file, "--mock-data"});
  EXPECT_EQ(line.arguments.fp8_format, Fp8Format::kE4m3);
  EXPECT_EQ(line.arguments.fp8_recipe, Fp8Recipe::kMxfp8);
  EXPECT_THAT(line.mindspeed->float8.only, ElementsAre("model.layers.{*}"));
  EXPECT_THAT(line.mindspeed->float8.ignored, ElementsAre("*gate", "*.experts")) << "there is no quantize.moe.mx";
}

TEST_F(MindSpeed, MegatronCoresRouteNamesTheDecoder) {
  const auto file = write("core.yaml", std::string("gpt_args: {seq_length: 8}\ndata:") + kData +
                                           "model: {freeze_vision_model: true, freeze_vision_projection: true, "
                                           "freeze_language_model: false, text_decoder: {model_id: qwen3_5_moe, "
                                           "num_moe_experts: 8, moe_router_topk: 2, gdn_implementation: triton}}\n");
  const auto [line, told] = apply({file});
  EXPECT_EQ(line.mindspeed->model_id, "qwen3_5_moe");
  const auto legacy = write("legacy.json", "{\"model_id\": \"qwen2_5vl\", \"text_decoder\": {\"model_id\": "
                                           "\"qwen3_vl\"}}");
  EXPECT_EQ(parse({"--mm-model", legacy}).mindspeed->model_id, "qwen2_5vl");
  EXPECT_EQ(line.mindspeed->sizes.at("model.text_decoder.num_moe_experts"), 8);
  EXPECT_THAT(line.arguments.freeze_modules, ElementsAre("model.visual.patch_embed", "model.visual.blocks",
                                                         "model.visual.pos_embed", "model.visual.merger"));
}

TEST_F(MindSpeed, Mistral3HasItsPartsBesideEachOther) {
  const auto data =
      write("data.json", "{\"dataset_param\": {\"basic_parameters\": {\"template\": \"mistral\", "
                         "\"dataset\": \"none.json\"}, \"preprocess_parameters\": {\"model_name_or_path\": "
                         "\"hf\", \"fix_mistral_regex\": true}}}");
  const auto model = write("model.json", "{\"model_id\": \"mistral3\", \"init_from_hf_path\": \"hf\", "
                                         "\"image_token_index\": 10, \"text_decoder\": {\"model_id\": \"mistral\", "
                                         "\"freeze\": false}, \"vision_encoder\": {\"freeze\": true}, "
                                         "\"vision_projector\": {\"freeze\": true}}");
  EXPECT_TRUE(parse({"--mm-data", data, "--mm-model", model}).mindspeed->data->fix_mistral_regex);
  const auto own = apply({"--mm-data", data, "--mm-model", model, "--data-path", "mine"});
  EXPECT_EQ(own.line.mindspeed->model_id, "mistral3");
  EXPECT_THAT(own.line.arguments.freeze_modules, ElementsAre("model.vision_tower", "model.multi_modal_projector"));
  EXPECT_THAT(own.line.arguments.data_path, ElementsAre("mine"));
  EXPECT_THAT(own.told, HasSubstr("is not read: the data are given by a flag"));
}

constexpr const char* kTiles = R"({"dataset_param": {"dataset_type": "multimodal",
  "basic_parameters": {"data_path": "chats.json", "data_folder": "pictures", "repeat_time": 1},
  "preprocess_parameters": {"train_pipeline": {"image": [{"trans_type": "Pad2Square"}, {"trans_type": "ToTensor"},
    {"trans_type": "norm_fun", "param": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}}]}},
  "tokenizer_config": {"from_pretrained": "hf", "add_eos_token": false}, "template_name": "internvl2_5",
  "down_sample_ratio": 0.5, "max_dynamic_patch": 12}})";

TEST_F(MindSpeed, TilesArePreparedByTheModelsOwnTemplate) {
  const auto data = write("data.json", kTiles);
  const auto model = write("model.json", R"({"model_id": "internvl", "init_from_hf_path": "hf", "loss_cfg":
                                             {"loss_type": "per_sample_loss"}})");
  const auto line = parse({"--mm-data", data, "--mm-model", model});
  const auto& run = *line.mindspeed;
  EXPECT_THAT(run.data->inputs, ElementsAre("chats.json"));
  EXPECT_EQ(run.data->model, "hf");
  EXPECT_EQ(run.data->columns.at("images"), "image");
  EXPECT_THAT(run.data->command(), Not(HasSubstr("pixels")));
  EXPECT_EQ(run.settings.at("max_dynamic_patch").first, "12");
  EXPECT_THAT(run.loss_by_sample, HasSubstr("loss_cfg.loss_type"));
}

TEST_F(MindSpeed, WhatIsNotHereIsRefusedByName) {
  struct Row {
    const char *line, *other, *message;
  };
  const Row rows[] = {
      {"model_id: qwen3_vl_moe", "model_id: wan2_2",
       ":5: model_id wan2_2 is no model that this program has; it has qwen2_5vl, qwen3_vl, qwen3_vl_moe, qwen3_5, "},
      {"freeze: [model.visual]", "freez: [model.visual]", "unknown key \"model.freez\"; did you mean freeze?"},
      {"freeze: [model.visual]", "text_encoder: {a: 1}", "model.text_encoder is given, but no model of this program"},
      {"loss_type: default", "loss_type: per_word_loss", "features.loss_cfg.loss_type is per_word_loss; the loss"},
      {"clip_grad: 0.0", "quantization_plan: {recipe_name: mxfp8-32x32}",
       "training.quantization_plan.recipe_name is mxfp8-32x32; write mxfp8, or remove the plan"},
      {"clip_grad: 0.0", "quantization_plan: {recipe_name: mxfp8}",
       "training.quantization_plan.recipe_name needs apply_modules, a list; give it, or remove the plan"},
      {"clip_grad: 0.0", "quantization_plan: {quant_converters: [quantize.moe.mx]}", "leaves linear layers out; write"},
      {"clip_grad: 0.0", "no_decay_params: [bias]", "training.no_decay_params is given, but give --param-group"},
      {"clip_grad: 0.0", "lr_scaling_plan: []\n  clip_grd: 1", "unknown key \"training.clip_grd\"; did you mean"},
      {"optimizer: adamw", "optimizer: adam", "one of adamw, adamw_swap, muon, got \"adam\"; did you mean adamw?"},
      {"optimizer: adamw", "save_format: hf", "training.save_format is hf; write dcp, and give --save-hf DIR"},
      {"optimizer: adamw", "load_format: hff", "training.load_format takes one of auto, dcp, hf, got \"hff\""},
      {"lr_warmup_ratio: 0.25", "lr_warmup_ratio: 2", "takes a number from 0 to 1, got \"2\""},
      {"enable: false", "enable: true, init_lora_weights: pissa", "init_lora_weights is pissa, but adapters begin"},
      {"template: qwen2vl", "template: llama3", "is llama3; conversations are prepared by the templates qwen2vl, "},
      {"template: qwen2vl", "template: qwen2vl, repeat_time: 3", "repeat_time is 3, but samples are drawn once an"},
      {"huggingface", "multimodal\n    template_name: qwen2vl", "template_name is qwen2vl; write internvl2_5"},
      {"image_min_pixels: 0", "train_pipeline: {image: [{trans_type: Flip}]}",
       "train_pipeline has the step Flip; tiles"},
      {"template: qwen2vl", "template: qwen2vl, streaming: True",
       "streaming is True, but a set is prepared as a whole"},
      {"packing: false", "packing: true",
       "packing is true, but packed conversations do not see each other here; give neat_packing: true instead"},
      {"images: images", "images: images, videos: videos", "attr.videos is videos, but videos are prepared by"},
      {"drop_last: true", "drop_last: false", "dataloader_param.drop_last is false, but batches are always full"},
      {"huggingface", "video", "dataset_type is video, but only conversations (huggingface, multimodal, qwen3_asr)"},
      {"image_max_pixels: 262144", "image_maxpixels: 262144", "did you mean image_max_pixels?"},
      {"dataset: chats.json, ", "", "dataset_param.basic_parameters.dataset is missing"},
  };
  const std::string whole = std::string(kNative) + "data:" + kData;
  for (const auto& [line, other, message] : rows) {
    auto text = whole;
    const auto place = text.find(line);
    ASSERT_NE(place, text.npos) << line;
    text.replace(place, std::string(line).size(), other);
    EXPECT_THAT(refusal({write("wrong.yaml", text)}), HasSubstr(message)) << other;
  }
  const auto both = refusal({write("wrong.yaml", "model: {model_id: qwen3_vl, a: 1}\ntraining: {b: 2, lr: x}\n")});
  EXPECT_THAT(both, HasSubstr("3 things must change:"));
  EXPECT_THAT(refusal({"--mm-model", write("m.json", "{\"upsampler\": {\"model_id\": \"wandit\"}}")}),
              HasSubstr("the section describes no model that this program has"));
  EXPECT_THAT(refusal({"--mm-data", "none.json"}), HasSubstr("--mm-data none.json"));
}

TEST_F(MindSpeed, EveryKeySaysWhatItTakes) {
  const std::string file = "x.yaml";
  for (const auto& sections : {mindspeed_data_sections(), mindspeed_model_sections(), mindspeed_training_sections()}) {
    for (const auto& section : sections) {
      for (const auto& key : section.keys) {
        if (key.take == nullptr) continue;
        MindSpeedRun run;
        Arguments arguments;
        const YamlValue value{file, std::string(section.path) + "." + key.name, YAML::Load("[[seven]]")};
        const auto message = usage_error([&] { key.take(value, run, arguments); });
        EXPECT_THAT(message, testing::ContainsRegex("x.yaml:1: " + value.key + ":? .*(takes|write) "));
      }
    }
  }
}

TEST_F(MindSpeed, TheModelMustBeThatOfItsConfiguration) {
  write("config.json", R"({"model_type": "qwen2_5_vl", "text_config": {"num_hidden_layers": 2, "hidden_size": 8,
                           "output_router_logits": true, "router_aux_loss_coef": 0.5},
                           "vision_config": {"depth": 3}})");
  Arguments arguments;
  arguments.hf_model = folder_.string();
  const auto refused = [&](const MindSpeedRun& run) {
    return usage_error([&] { check_mindspeed_model(run, arguments); });
  };
  MindSpeedRun run;
  run.model_id = "qwen2_5vl";
  run.sizes = {{"text_decoder.num_layers", 2}, {"image_encoder.vision_encoder.num_layers", 3}};
  EXPECT_NO_THROW(check_mindspeed_model(run, arguments));
  run.sizes["text_decoder.hidden_size"] = 16;
  EXPECT_THAT(refused(run), HasSubstr("text_decoder.hidden_size is 16, but config.json of the model says 8"));
  run.is_from_hf = true;
  EXPECT_NO_THROW(check_mindspeed_model(run, arguments)) << "MindSpeed-MM does not read them either";
  run.router_aux_loss_coef = 0;
  EXPECT_THAT(refused(run), HasSubstr("router_aux_loss_coef is 0.0, but by config.json of the model it is 0.5"));
  run.router_aux_loss_coef = 0.5;
  run.settings["max_dynamic_patch"] = {"12", "data.json:3: max_dynamic_patch"};
  EXPECT_THAT(refused(run),
              HasSubstr("data.json:3: max_dynamic_patch is 12, but config.json of the model does not have"));
  run.settings.clear();
  run.model_id = "qwen3_vl";
  EXPECT_THAT(refused(run),
              HasSubstr("is qwen3_vl, but " + folder_.string() + "/config.json is of model_type qwen2_5"));
}

TEST_F(MindSpeed, EpochsAndLongWarmUps) {
  const auto file = write(
      "epochs.yaml", "training: {train_epochs: 3, train_iters: 9, micro_batch_size: 2, lr_warmup_ratio: 1.0, save: "
                     "out}\nmodel: {model_name_or_path: hf}\n");
  const auto [line, told] = apply({file, "--mock-data"}, 4);
  EXPECT_EQ(line.arguments.train_iters, 3 * (100 / 8));
  EXPECT_EQ(line.arguments.lr_warmup_iters, 36);
  EXPECT_EQ(line.arguments.lr_decay_iters, 37) << "behind the run";
  EXPECT_EQ(line.arguments.save_interval, 1);
  EXPECT_FALSE(line.arguments.from_scratch) << "no meta device";
  EXPECT_THAT(told, HasSubstr("train_epochs 3 of 100 samples are 36 iterations"));
}

}  // namespace
}  // namespace megashard
