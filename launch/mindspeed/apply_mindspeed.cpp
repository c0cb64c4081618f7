#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "framework/arguments/argument_table.h"
#include "framework/modules/module_patterns.h"
#include "launch/mindspeed/mindspeed_keys.h"

namespace megashard {
namespace {

using std::to_string;

void freeze_parts(const MindSpeedRun& run, Arguments& arguments) {
  const auto* model = find_mindspeed_model(run.model_id);
  if (model == nullptr) return;
  const auto add = [&](bool frozen, const auto& modules) {
    if (frozen) arguments.freeze_modules.insert(arguments.freeze_modules.end(), modules.begin(), modules.end());
  };
  // pretrain_vlm freezes the tower unless its section says otherwise
  add(run.freezes_encoder.value_or(!run.is_from_hf), model->encoder);
  add(run.freezes_projector.value_or(false), model->projector);
  add(run.freezes_audio.value_or(false), model->audio);
  add(run.freezes_decoder.value_or(false), std::vector<const char*>{"model.language_model", "lm_head"});
}

/// Drops network flags that Megatron requires; the model is built from config.json only.
void drop_flags_of_the_network(Arguments& arguments, const DiagnosticSink& sink) {
  std::vector<std::string> dropped;
  const auto drop = [&](const char* name, auto& field) {
    if (arguments.given.erase(name) > 0) dropped.push_back(find_argument(name)->flag);
    field = {};
  };
  drop("vocab_size", arguments.vocab_size);
  drop("padded_vocab_size", arguments.padded_vocab_size);
  drop("tokenizer_type", arguments.tokenizer_type);
  if (!dropped.empty())
    sink(Severity::kNotice,
         "MindSpeed-MM: without effect, because config.json describes the model: " + c10::Join(", ", dropped));
}

void apply_data(MindSpeedRun& run, Arguments& arguments, const RunParts& parts, const DiagnosticSink& sink,
                Mistakes& mistakes) {
  if (!run.data) return;
  if (!parts.data) {
    if (!arguments.seq_length) arguments.seq_length = run.data->cutoff_length;
    return;
  }
  if (has_own_data(arguments)) {
    sink(Severity::kNotice, run.data->place + " is not read: the data are given by a flag");
    return;
  }
  if (!run.data->cutoff_length) run.data->cutoff_length = arguments.seq_length;
  if (!arguments.seq_length) arguments.seq_length = run.data->cutoff_length;
  if (run.data->inputs.empty()) return;  // the reader reports this error and the next
  arguments.data_path = {run.data->prefix()};
  if (std::ranges::count(turn_templates(), run.data->turn_template) == 0) return;
  mistakes.attempt([&] { require_prepared(*run.data); });
  if (run.validation && !run.validation->inputs.empty()) {
    Preparation validation = *run.data;
    validation.inputs = run.validation->inputs;
    validation.max_samples = run.validation->max_samples;
    mistakes.attempt([&] { require_prepared(validation); });
    arguments.train_data_path = std::exchange(arguments.data_path, {});
    arguments.valid_data_path = {validation.prefix()};
  } else if (run.validation_share > 0) {
    arguments.split = argument_text(1 - run.validation_share) + "," + argument_text(run.validation_share) + ",0";
  } else {
    arguments.split = "1,0,0";
    arguments.eval_iters = 0;
    sink(Severity::kNotice, run.data->place + " has no val_dataset and no val_rate, so nothing is evaluated");
  }
}

/// The noise and the data of a diffusion model.
void apply_diffusion(MindSpeedRun& run, Arguments& arguments, const RunParts& parts, const DiagnosticSink& sink,
                     Mistakes& mistakes) {
  const MindSpeedDiffusion& diffusion = *run.diffusion;
  mistakes.require(0 <= diffusion.first_share && diffusion.first_share < diffusion.last_share &&
                       diffusion.last_share <= 1 && diffusion.shift > 0,
                   "diffusion: min_timestep_boundary must be smaller than max_timestep_boundary, both from 0 to 1, and "
                   "shift positive.");
  mistakes.require(arguments.hf_model.has_value(),
                   run.model_place + ": nothing names the files of the model; give --hf-model DIR, a folder of "
                                     "diffusers with config.json.");
  if (!arguments.is_given("objective")) arguments.objective = "flow-matching";
  const double logit_normal = 1, ltx2_length = 2;  // among --timestep-sampling's and --timestep-shift-by's words
  if (diffusion.is_ltx2) {
    if (!diffusion.draws_uniformly)
      arguments.objective_options.insert({{"--timestep-sampling", logit_normal},
                                          {"--timestep-logit-std", diffusion.logit_std},
                                          {"--timestep-shift-by", ltx2_length}});
  } else if (diffusion.is_hunyuan) {
    arguments.objective_options.insert({{"--timestep-shift", diffusion.training_shift},
                                        {"--timestep-sampling", diffusion.draws_uniformly ? 0 : logit_normal}});
  } else {
    const double bsmntw = 1;  // among --timestep-weighting's words
    arguments.objective_options.insert({{"--timestep-shift", diffusion.shift},
                                        {"--timestep-min", diffusion.timestep_at(diffusion.last_share)},
                                        {"--timestep-max", diffusion.timestep_at(diffusion.first_share)},
                                        {"--timestep-weighting", bsmntw}});
  }
  arguments.lora_target_modules = diffusers_layers(arguments.lora_target_modules);
  if (!parts.data || diffusion.data_path.empty()) return;
  if (has_own_data(arguments)) {
    sink(Severity::kNotice, diffusion.place + " is not read: the data are given by a flag");
    return;
  }
  mistakes.attempt([&] { require_features(diffusion); });
  arguments.data_path = {diffusion.features()};
  arguments.split = "1,0,0";
  arguments.eval_iters = 0;
  sink(Severity::kNotice, diffusion.place + " has one data set, so nothing is evaluated");
}

void apply_length(const MindSpeedRun& run, Arguments& arguments, int64_t world_size, const RunParts& parts,
                  const std::function<int64_t()>& samples_of_epoch, const DiagnosticSink& sink) {
  const int64_t shared = arguments.context_parallel_size;
  require(shared >= 1 && world_size % shared == 0, "--context-parallel-size " + to_string(shared) +
                                                       " must divide the number of ranks, " + to_string(world_size) +
                                                       "; change one of them.");
  if (!arguments.is_given("global_batch_size")) {
    arguments.global_batch_size = *arguments.micro_batch_size * run.gradient_accumulation_steps * (world_size / shared);
    sink(Severity::kNotice, "MindSpeed-MM: micro_batch_size " + to_string(*arguments.micro_batch_size) +
                                " * gradient_accumulation_steps " + to_string(run.gradient_accumulation_steps) + " * " +
                                to_string(world_size / shared) + " ranks are a global batch of " +
                                to_string(*arguments.global_batch_size));
  }
  if (!parts.schedule) return;
  if (run.epochs && !run.length_by_flag) {
    const int64_t samples = samples_of_epoch();
    arguments.train_iters = std::max<int64_t>(1, *run.epochs * (samples / *arguments.global_batch_size));
    sink(Severity::kNotice, "MindSpeed-MM: train_epochs " + to_string(*run.epochs) + " of " + to_string(samples) +
                                " samples are " + to_string(*arguments.train_iters) + " iterations");
  }
  const auto iterations = static_cast<double>(*arguments.train_iters);
  const bool warms_up = arguments.lr_warmup_fraction || arguments.lr_warmup_iters != 0;
  if (!warms_up) arguments.lr_warmup_iters = static_cast<int64_t>(iterations * run.warmup_ratio);
  if (!arguments.lr_decay_iters && arguments.lr_decay_style == LrDecayStyle::kCosine && run.decay_ratio < 1)
    arguments.lr_decay_iters = static_cast<int64_t>(iterations * run.decay_ratio);
  if (!arguments.lr_decay_iters && arguments.lr_warmup_iters >= *arguments.train_iters)
    arguments.lr_decay_iters = arguments.lr_warmup_iters + 1;  // beyond the end of the run
}

/// training.load is a folder of Hugging Face weights.
void apply_hf_weights(const MindSpeedRun& run, const Arguments& arguments, const DiagnosticSink& sink) {
  if (*arguments.hf_model != run.load) {
    sink(Severity::kNotice, "training.load " + run.load + " is not read: the weights are those of --hf-model");
  } else if (!run.hf_folder.empty() && run.hf_folder != run.load) {
    sink(Severity::kNotice, "the model is described by config.json of training.load, " + run.load +
                                ", and not of model_name_or_path, " + run.hf_folder);
  }
  const bool weights_alone = arguments.no_save_optim && arguments.no_save_rng;
  if (arguments.save && run.save_format == "auto" && weights_alone) {
    sink(Severity::kWarning,
         "training.save_format auto would save Hugging Face files in MindSpeed-MM, as training.load holds such; "
         "checkpoints are PyTorch's here: give --save-hf DIR for Hugging Face files, or write dcp");
  }
}

/// Weights come from training.load or are initialised; model_name_or_path only describes the model.
void apply_start(const MindSpeedRun& run, Arguments& arguments, const RunParts& parts, const DiagnosticSink& sink,
                 Mistakes& mistakes) {
  const bool trains = parts.training && !arguments.skip_train;
  const bool has_start = arguments.load || arguments.from_scratch || !trains || run.loads_hf;
  if (run.loads_hf) apply_hf_weights(run, arguments, sink);
  mistakes.require(run.load_format != "hf" || run.loads_hf || run.load.empty(),
                   "training.load_format is hf, but " + run.load +
                       " has no model.safetensors; write auto, or name a folder of Hugging Face weights.");
  if (!run.is_native || !arguments.init_model_with_meta_device || has_start) return;
  arguments.from_scratch = !run.model_by_flag;
  if (!arguments.from_scratch) return;
  sink(Severity::kWarning,
       "training.init_model_with_meta_device without training.load: as in MindSpeed-MM, the weights are drawn, not "
       "those of model_name_or_path; to train those, give --hf-model " +
           arguments.hf_model.value_or("DIR") + ", or the checkpoint by training.load");
}

void apply_files(Arguments& arguments, const DiagnosticSink& sink) {
  if (arguments.save_interval && !arguments.save) {
    sink(Severity::kNotice, "MindSpeed-MM: without effect, because there is no --save: --save-interval");
    arguments.save_interval.reset();
  }
  std::string tracked;
  if (!arguments.lora_r || !arguments.load || !arguments.hf_model) return;
  std::ifstream(*arguments.load + "/latest_checkpointed_iteration.txt") >> tracked;
  if (tracked != "release") return;
  sink(Severity::kWarning, "--load " + *arguments.load +
                               " holds the weights that adapters are trained for, which are "
                               "taken from --hf-model " +
                               *arguments.hf_model + " here: they must be the same");
  arguments.load.reset();
}

nlohmann::ordered_json config_json(const Arguments& arguments) {
  std::ifstream file(*arguments.hf_model + "/config.json");
  auto config = nlohmann::ordered_json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object() || !config.contains("thinker_config")) return config;
  auto part = config["thinker_config"];  // describes what is trained; the rest speaks
  part["model_type"] = config.value("model_type", "");
  return part;
}

/// A number of config.json, or of its object for a part of the model.
std::optional<double> number_in(const nlohmann::ordered_json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || !found->is_number() ? std::nullopt : std::optional(found->get<double>());
}

void check_sizes(const MindSpeedRun& run, const nlohmann::ordered_json& config, Mistakes& mistakes) {
  static const std::map<std::string, const char*> names = {
      {"text_decoder.num_layers", "num_hidden_layers"},
      {"text_decoder.hidden_size", "hidden_size"},
      {"text_decoder.ffn_hidden_size", "intermediate_size"},
      {"text_decoder.num_attention_heads", "num_attention_heads"},
      {"text_decoder.num_query_groups", "num_key_value_heads"},
      {"text_decoder.num_moe_experts", "num_experts"},
      {"text_decoder.moe_router_topk", "num_experts_per_tok"},
      {"text_decoder.moe_ffn_hidden_size", "moe_intermediate_size"},
      {"predictor.num_layers", "num_layers"},
      {"predictor.ffn_dim", "ffn_dim"},
      {"predictor.freq_dim", "freq_dim"},
      {"predictor.text_dim", "text_dim"},
      {"predictor.num_heads", "num_attention_heads"},
      {"predictor.in_dim", "in_channels"},
      {"predictor.out_dim", "out_channels"},
      {"transformer.num_layers", "num_layers"},
      {"transformer.num_attention_heads", "num_attention_heads"},
      {"transformer.attention_head_dim", "attention_head_dim"},
      {"transformer.in_channels", "in_channels"},
      {"transformer.out_channels", "out_channels"},
      {"transformer.cross_attention_dim", "cross_attention_dim"},
      {"transformer.caption_channels", "caption_channels"},
      {"transformer.timestep_scale_multiplier", "timestep_scale_multiplier"},
      {"predictor.mm_double_blocks_depth", "num_layers"},
      {"predictor.out_channels", "out_channels"},
      {"predictor.text_states_dim", "text_embed_dim"},
      {"predictor.vision_states_dim", "image_embed_dim"},
      {"image_encoder.vision_encoder.num_layers", "depth"},
      {"image_encoder.vision_encoder.hidden_size", "hidden_size"},
      {"image_encoder.vision_encoder.ffn_hidden_size", "intermediate_size"},
      {"image_encoder.vision_encoder.num_attention_heads", "num_heads"},
      {"image_encoder.vision_encoder.patch_size", "patch_size"},
      {"image_encoder.vision_encoder.out_hidden_size", "out_hidden_size"}};
  const auto part = [&](const char* name) { return config.contains(name) ? config.at(name) : config; };
  for (const auto& [key, size] : run.sizes) {
    const auto name = key.starts_with("model.") ? key.substr(6) : key;
    const auto found = names.find(name);
    if (found == names.end()) continue;
    const auto theirs = number_in(part(name.starts_with("text") ? "text_config" : "vision_config"), found->second);
    mistakes.require(!theirs || *theirs == static_cast<double>(size),
                     "the model section's " + name + " is " + to_string(size) + ", but config.json of the model says " +
                         argument_text(theirs.value_or(0)) + "; correct one of them.");
  }
}

/// Requires that the data section says of pictures what config.json says.
void check_settings(const MindSpeedRun& run, const nlohmann::ordered_json& config, Mistakes& mistakes) {
  for (const auto& [key, setting] : run.settings) {
    const auto& [words, place] = setting;
    const auto& vision = config.contains("vision_config") ? config.at("vision_config") : config;
    const auto& part = key == "patch_size" || key == "image_size" ? vision : config;
    const auto theirs = part.contains(key) ? part.at(key).dump() : "";
    const auto ours = nlohmann::ordered_json::parse(words, nullptr, /*allow_exceptions=*/false);
    mistakes.require(part.contains(key) && part.at(key) == ours,
                     place + " is " + words + ", but config.json of the model " +
                         (theirs.empty() ? "does not have " + key +
                                               "; prepare the pictures by it (docs/data.md) and give --data-path."
                                         : "says " + theirs + "; correct one of them."));
  }
}

void check_balance(const MindSpeedRun& run, const nlohmann::ordered_json& config, Mistakes& mistakes) {
  if (!run.router_aux_loss_coef) return;
  const auto& text = config.contains("text_config") ? config.at("text_config") : config;
  const bool on = text.value("output_router_logits", false) || config.value("output_router_logits", false);
  const double ours = on ? number_in(text, "router_aux_loss_coef").value_or(0.001) : 0;
  mistakes.require(*run.router_aux_loss_coef == ours,
                   "loss_cfg.router_aux_loss_coef is " + argument_text(*run.router_aux_loss_coef) +
                       ", but by config.json of the model it is " + argument_text(ours) +
                       ", which counts here: set output_router_logits to " +
                       (*run.router_aux_loss_coef > 0 ? "true and router_aux_loss_coef to that" : "false") + " there.");
}

}  // namespace

void apply_mindspeed(MindSpeedRun& run, Arguments& arguments, int64_t world_size,
                     const std::function<int64_t()>& samples_of_epoch, const DiagnosticSink& sink, Mistakes& mistakes,
                     const RunParts& parts) {
  freeze_parts(run, arguments);
  if (run.is_from_hf || find_mindspeed_model(run.model_id) != nullptr) drop_flags_of_the_network(arguments, sink);
  if (run.diffusion) {
    apply_diffusion(run, arguments, parts, sink, mistakes);
  } else {
    apply_data(run, arguments, parts, sink, mistakes);
  }
  mistakes.require(
      run.loss_by_sample.empty() || !parts.training || (arguments.micro_batch_size == 1 && !arguments.neat_packing),
      run.loss_by_sample + " is per_sample_loss, the mean of each sample's mean, which is computed for "
                           "micro batches of one sample; give --micro-batch-size 1 without packing.");
  if (run.is_native && parts.training) {
    mistakes.attempt([&] { apply_length(run, arguments, world_size, parts, samples_of_epoch, sink); });
    // MindSpeed-MM's optimizer decays every parameter.
    if (arguments.weight_decay != 0) {
      auto& overrides = arguments.param_group_overrides;
      overrides.insert(overrides.begin(), "*:wd_mult=1");
    }
  }
  apply_start(run, arguments, parts, sink, mistakes);
  apply_files(arguments, sink);
  if (!run.unused.empty()) sink(Severity::kNotice, "MindSpeed-MM: not used here: " + c10::Join(", ", run.unused));
}

void apply_mindspeed(const MindSpeedRun& run, Fsdp2Config& config) {
  const auto* model = find_mindspeed_model(run.model_id);
  const bool own = !run.is_native && model != nullptr && model->always_recomputes;
  if (config.recompute_modules.empty() && own) {
    config.recompute_modules = {"model.visual.blocks.{*}", "model.language_model.layers.{*}"};
    if (!model->audio.empty()) config.recompute_modules.emplace_back("model.audio_tower.layers.{*}");
    config.use_reentrant = true;
  }
  if (run.recomputes && !run.recompute_modules.empty()) {
    config.recompute_modules = run.recompute_modules;
    config.use_reentrant = run.recompute_reentrant;
  }
  if (run.offloads && config.offload_modules.empty()) config.offload_modules = run.offload_modules;
  if (!run.diffusion) return;
  if (config.sub_modules_to_wrap) config.sub_modules_to_wrap = diffusers_paths(*config.sub_modules_to_wrap);
  for (auto* patterns : {&config.recompute_modules, &config.offload_modules, &config.ignored_modules})
    *patterns = diffusers_paths(*patterns);
}

void check_mindspeed_model(const MindSpeedRun& run, const Arguments& arguments) {
  if (!arguments.hf_model) return;
  const auto config = config_json(arguments);
  if (!config.is_object()) return;  // its reader reports the error
  Mistakes mistakes;
  const std::string key = run.diffusion ? "_class_name" : "model_type";
  const auto type = config.value(key, "");
  const auto* model = find_mindspeed_model(run.model_id);
  const bool fits = model == nullptr || std::ranges::count(comma_words({model->model_type}), type) > 0;
  mistakes.require(fits, run.model_place + " is " + run.model_id + ", but " + *arguments.hf_model +
                             "/config.json is of " + key + " " + type + "; correct one of them.");
  if (!run.is_from_hf) check_sizes(run, config, mistakes);
  check_balance(run, config, mistakes);
  if (!has_own_data(arguments)) check_settings(run, config, mistakes);
  mistakes.throw_if_any();
}

}  // namespace megashard
