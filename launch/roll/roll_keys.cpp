#include "launch/roll/roll_keys.h"

#include <c10/util/StringUtil.h>

#include <limits>
#include <set>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_value.h"
#include "framework/mistakes.h"

namespace megashard {
namespace {

using V = YamlValue;
using W = RollWorker;
using A = Arguments;

/// Sets a flag of ours.
template <const char* flag>
void to_flag(const V& value, W&, A& arguments) {
  set_option(*find_option(flag), value, arguments);
}

constexpr char kSeed[] = "--seed", kHfModel[] = "--hf-model", kSeqLength[] = "--seq-length",
               kSaveInterval[] = "--save-interval", kLogInterval[] = "--log-interval",
               kEvalInterval[] = "--eval-interval", kMostRecent[] = "--most-recent-k", kClip[] = "--clip-grad",
               kTimeout[] = "--distributed-timeout-minutes", kLr[] = "--lr", kDecay[] = "--weight-decay",
               kBeta1[] = "--adam-beta1", kBeta2[] = "--adam-beta2", kMicroBatch[] = "--micro-batch-size",
               kWorkers[] = "--num-workers", kContext[] = "--context-parallel-size", kTiles[] = "--tiled-num-shards",
               kMaxPixels[] = "--image-max-pixels", kMinPixels[] = "--image-min-pixels",
               kLoraDropout[] = "--lora-dropout", kExpertRanks[] = "--expert-model-parallel-size";

void take_resume(const V& value, W&, A& arguments) {
  bool flag = false;
  if (!YAML::convert<bool>::decode(YAML::Node(value.text()), flag)) {
    arguments.load = value.text();
    arguments.resume_key = value.key;
  } else if (flag) {
    value.expected("false, or the folder of a checkpoint");
  }
}

/// The pipeline's model is used unless the worker names one.
void take_pretrain(const V& value, W& worker, A& arguments) {
  if (!arguments.hf_model) to_flag<kHfModel>(value, worker, arguments);
}

void take_devices(const V& value, W& worker, A&) {
  std::string text = c10::Join(",", value.words());
  if (value.node.IsSequence()) text = "[" + text + "]";
  const auto devices = parse_device_mapping(text);
  if (!devices || devices->empty()) {
    value.fail("takes distinct devices, as in list(range(0,16)) or [0, 1]; it is read, not "
               "evaluated, and \"" +
               text + "\" is neither");
  }
  worker.device_mapping = *devices;
}

void take_scheduler(const V& value, W&, A& arguments) {
  const auto name = value.text();
  if (name == "linear") {
    arguments.lr_decay_style = LrDecayStyle::kLinear;
  } else if (name == "cosine") {
    arguments.lr_decay_style = LrDecayStyle::kCosine;
  } else if (name == "constant" || name == "constant_with_warmup") {
    arguments.lr_decay_style = LrDecayStyle::kConstant;
  } else {
    value.expected_one_of({"linear", "cosine", "constant", "constant_with_warmup"});
  }
}

void take_freeze(const V& value, W&, A& arguments) { arguments.freeze_module_prefix = comma_words(value.words()); }

void take_lora_target(const V& value, W&, A& arguments) {
  auto& targets = arguments.lora_target_modules;
  targets = comma_words(value.words());
  if (targets.empty()) value.expected("names of linear layers");
  for (auto& name : targets) {
    if (name.find_first_of("*$|(") != name.npos)
      value.fail("is a pattern, " + name + "; list the names of linear layers, or all-linear");
    if (name == "all-embedding" || name == "all-router")
      value.fail("is " + name + ", but adapters are of linear layers only; list their names");
    if (name == "all") name = "all-linear";
  }
}

template <const char* flag>
void take_pixels(const V& value, W& worker, A&) {
  worker.image_pixels[flag] = value.integer(0);
}

void take_prefetch(const V& value, W& worker, A&) { worker.sharding.num_to_forward_prefetch = value.boolean() ? 1 : 0; }

void take_reshard(const V& value, W& worker, A&) { worker.sharding.reshard_after_forward = value.boolean(); }

WrapPolicy& policy(W& worker) { return *worker.sharding.wrap_policy; }

template <const char* flag>
constexpr RollKey flag_key(const char* name, bool roll_drops = false) {
  return {name, to_flag<flag>, roll_drops, flag};
}

/// Sets the defaults of PyTorch's ShardedGradScaler(growth_interval=400).
void scale_as_roll(A& arguments) {
  arguments.initial_loss_scale = 65536;
  arguments.min_loss_scale = std::numeric_limits<float>::min();
  arguments.loss_scale_window = 400;
  arguments.hysteresis = 1;
}

const RollKey kPipeline[] = {
    flag_key<kSeed>("seed"),
    {"pretrain", take_pretrain},
    flag_key<kSeqLength>("sequence_length"),
    {"prompt_length", [](const V& value, W& worker, A&) { worker.prompt_length = value.integer(1); }},
    {"response_length", [](const V& value, W& worker, A&) { worker.response_length = value.integer(1); }},
    flag_key<kSaveInterval>("save_steps"),
    flag_key<kLogInterval>("logging_steps"),
    flag_key<kEvalInterval>("eval_steps"),
    {"max_ckpt_to_keep",
     [](const V& value, W& worker, A& arguments) {
       if (value.integer(0) > 0) to_flag<kMostRecent>(value, worker, arguments);
     }},
    flag_key<kClip>("max_grad_norm"),
    {"resume_from_checkpoint", take_resume},
};

const RollKey kWorker[] = {
    {"device_mapping", take_devices},
    {"world_size", [](const V& value, W& worker, A&) { worker.world_size = value.integer(1); }},
    {"infer_batch_size", [](const V& value, W& worker, A&) { worker.infer_batch_size = value.integer(1); }},
    flag_key<kTimeout>("backend_timeout"),
    {"name"},
    {"worker_cls", [](const V& value, W&, A&) { value.text(); }},
    {"pg_variant"},
    {"data_args"},
    {"generating_args"},
    {"num_gpus_per_worker"},
    {"model_update_frequency"},
    {"system_envs"},
    {"max_concurrency"},
    {"offload_nccl"},
    {"use_dynamic_batching_in_train"},
    {"max_tokens_per_microbatch_in_train"},
    {"sequence_length_round_in_train"},
    {"use_dynamic_batching_in_infer"},
    {"max_tokens_per_microbatch_in_infer"},
    {"sequence_length_round_in_infer"},
    {"use_sequence_packing"},
    {"sequence_packing_args"},
    {"use_remove_padding"},
    {"logits_in_fp32"},
    {"router_replay"},
    {"apply_loss_scale"},
    {"tag_included"},
    {"checkpoint_config"},
    {"topr_positive_weight"},
    {"topr_negative_weight"},
    {"mtp_training_mode"},
    {"opd_kl_coef"},
};

void take_model_type(const V& value, W& worker, A&) {
  if (worker.loss.pipeline != RollPipeline::kValues)
    value.fail("is " + value.text() + ", but only a critic has another head here; remove it");
  worker.unused.push_back(value.key + ": the head of a critic is `score`");
}

const RollKey kModel[] = {
    flag_key<kHfModel>("model_name_or_path"),
    {"freeze_module_prefix", take_freeze},
    {"disable_gradient_checkpointing", [](const V& value, W& worker, A&) { worker.recompute = !value.boolean(); }},
    {"gradient_checkpointing_use_reentrant",
     [](const V& value, W& worker, A&) { worker.recompute_reentrant = value.boolean(); }},
    {"dtype", [](const V& value, W&, A&) { value.dtype(); }},  // checked only: param_dtype is the compute dtype
    flag_key<kContext>("ulysses_size"),
    {"model_type", take_model_type},
    {"model_config_kwargs"},
    {"moe_aux_loss_coef"},
    {"max_pixels", take_pixels<kMaxPixels>, true},
    {"min_pixels", take_pixels<kMinPixels>, true},
    {"attn_implementation"},
    {"flash_attn"},
    {"device_map"},
    {"num_labels"},
    {"adapter_name_or_path"},
    {"additional_target"},
    {"autocast_adapter_dtype"},
    {"lora_target", take_lora_target},
    {"lora_r", [](const V& value, W& worker, A&) { worker.lora_r = value.integer(1); }, true},
    {"lora_rank", [](const V& value, W& worker, A&) { worker.lora_rank = value.integer(1); }},
    {"lora_alpha",
     [](const V& value, W& worker, A&) {
       if (value.number() != 0) worker.lora_alpha = value.number();
     }},
    flag_key<kLoraDropout>("lora_dropout"),
};

const RollKey kTraining[] = {
    flag_key<kLr>("learning_rate"),
    flag_key<kDecay>("weight_decay"),
    flag_key<kBeta1>("adam_beta1"),
    flag_key<kBeta2>("adam_beta2"),
    flag_key<kMicroBatch>("per_device_train_batch_size"),
    {"gradient_accumulation_steps",
     [](const V& value, W& worker, A&) { worker.gradient_accumulation_steps = value.integer(1); }},
    {"num_train_epochs",
     [](const V& value, W& worker, A&) {
       worker.epochs = value.number();
       if (!(worker.epochs > 0)) value.expected("a number above 0");
     }},
    {"max_steps", [](const V& value, W& worker, A&) { worker.max_steps = value.integer(-1); }},
    {"warmup_steps", [](const V& value, W& worker, A&) { worker.warmup_steps = value.integer(0); }},
    {"warmup_ratio",
     [](const V& value, W& worker, A&) {
       worker.warmup_ratio = value.number();
       if (!(worker.warmup_ratio >= 0 && worker.warmup_ratio < 1)) value.expected("a number from 0 to below 1");
     }},
    {"lr_scheduler_type", take_scheduler},
    flag_key<kWorkers>("dataloader_num_workers"),
    flag_key<kSeed>("seed"),
    flag_key<kSaveInterval>("save_steps", /*roll_drops=*/true),
    flag_key<kLogInterval>("logging_steps", /*roll_drops=*/true),
    flag_key<kEvalInterval>("eval_steps", /*roll_drops=*/true),
    flag_key<kClip>("max_grad_norm", /*roll_drops=*/true),
    {"data_seed"},
    {"output_dir"},
    {"bf16"},
    {"tf32"},
    {"fp16"},
    {"save_hf_model"},
};

const RollKey kStrategy[] = {
    {"fsdp_size", [](const V& value, W& worker, A&) { worker.fsdp_size = value.integer(-1); }},
    {"param_dtype",
     [](const V& value, W& worker, A& arguments) {
       worker.sharding.mixed_precision.param_dtype = value.dtype();
       if (value.dtype() == at::kHalf) scale_as_roll(arguments);
     }},
    {"reduce_dtype",
     [](const V& value, W& worker, A&) { worker.sharding.mixed_precision.reduce_dtype = value.dtype(); }},
    {"reshard_after_forward", take_reshard},
    {"forward_prefetch", take_prefetch, true},
    {"offload_policy", [](const V& value, W& worker, A&) { worker.sharding.offload_to_cpu = value.boolean(); }},
    {"async_save_ckpt", [](const V& value, W&, A& arguments) { arguments.async_save = value.boolean(); }},
    {"save_only_model", [](const V& value, W&, A& arguments) { arguments.no_save_optim = value.boolean(); }},
    {"reduce_scatter_during_grad_accumulation",
     [](const V& value, W&, A& arguments) { arguments.reduce_scatter_during_grad_accumulation = value.boolean(); }},
    flag_key<kExpertRanks>("ep_size"),
    {"efsdp_size", [](const V& value, W& worker, A&) { worker.efsdp_size = value.integer(1); }},
    {"moe_use_grouped_mm"},
    {"apply_expert_patch", [](const V& value, W&, A&) { value.boolean(); }},  // all experts always run
    {"apply_tiled_mlp", [](const V& value, W&, A& arguments) { arguments.apply_tiled_mlp = value.boolean(); }},
    flag_key<kTiles>("tiled_num_shards"),
    {"model_type"},
    {"use_batched_model_update"},
};

const RollKey kWrap[] = {
    {"transformer_layer_cls_to_wrap",
     [](const V& value, W& worker, A&) {
       policy(worker).layer_classes = value.words();
       if (policy(worker).layer_classes->empty())
         value.fail("is an empty list; name classes of layers, or leave it out for the model's layers");
     }},
    {"wrap_embeddings", [](const V& value, W& worker, A&) { policy(worker).embeddings = value.boolean(); }},
    {"wrap_lm_output", [](const V& value, W& worker, A&) { policy(worker).lm_output = value.boolean(); }},
    {"moe_experts", [](const V& value, W& worker, A&) { policy(worker).expert_classes = value.words(); }},
};

}  // namespace

std::span<const RollKey> roll_pipeline_keys() { return kPipeline; }
std::span<const RollKey> roll_worker_keys() { return kWorker; }
std::span<const RollKey> roll_model_keys() { return kModel; }
std::span<const RollKey> roll_training_keys() { return kTraining; }
std::span<const RollKey> roll_strategy_keys() { return kStrategy; }
std::span<const RollKey> roll_wrap_keys() { return kWrap; }

std::string with_roll_keys(const std::string& message) {
  std::set<std::string> keys;
  using enum RollPipeline;
  for (const auto table : {roll_pipeline_keys(), roll_worker_keys(), roll_model_keys(), roll_training_keys(),
                           roll_strategy_keys(), roll_loss_keys(kPairs), roll_loss_keys(kAnswers),
                           roll_loss_keys(kValues), roll_loss_keys(kDistilled), roll_loss_worker_keys(kAnswers)}) {
    for (const auto& key : table) {
      if (key.flag != nullptr && names_flag(message, key.flag)) keys.insert(c10::str(key.name, " for ", key.flag));
    }
  }
  if (keys.empty()) return message;
  const bool is_sentence = message.ends_with('.') || message.ends_with('?');
  return message + (is_sentence ? "" : ".") + " In ROLL's file: " + c10::Join(", ", keys) + ".";
}

const std::vector<MissingFunction>& missing_functions() {
  static const std::vector<MissingFunction> all = {
      {"model_args", "adapter_name_or_path", {}, "adapters come from --load here"},
      {"model_args", "additional_target", {}, "nothing but adapters is trained beside them here"},
      {"model_args", "moe_aux_loss_coef", {}, "router_aux_loss_coef of config.json decides"},
      {"model_args", "model_config_kwargs", {}, "config.json of the model decides"},
  };
  return all;
}

}  // namespace megashard
