#include "launch/roll/roll_worker.h"

#include <gmock/gmock.h>

#include "launch/roll/roll_keys.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// Written as ROLL's examples, with every section.
constexpr const char* kPipeline = R"(
hydra: {run: {dir: .}}
exp_name: "tiny"
seed: 7
checkpoint_config:
  output_dir: /data/${exp_name}
max_steps: 500
save_steps: 100
logging_steps: 1
eval_steps: 10
resume_from_checkpoint: false
sequence_length: ${response_length}
response_length: 16
root: /models
pretrain: ${root}/tiny
actor_train:
  model_args:
    disable_gradient_checkpointing: false
    attn_implementation: fa2
    dtype: bf16
    model_type: ~
    freeze_module_prefix: model.embed_tokens, model.layers.0.
    ulysses_size: 1
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 32
    warmup_steps: 20
    num_train_epochs: 1.5
    lr_scheduler_type: cosine
  data_args:
    template: qwen3
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 8
      param_dtype: bf16
      reduce_dtype: float32
      reshard_after_forward: true
      offload_policy: true
      async_save_ckpt: true
      save_only_model: true
      reduce_scatter_during_grad_accumulation: false
      apply_tiled_mlp: False
      use_batched_model_update: false
      wrap_policy:
        wrap_lm_output: true
        transformer_layer_cls_to_wrap:
          - Qwen3Attention
          - Qwen3MLP
  use_remove_padding: true
  device_mapping: list(range(0,16))
  infer_batch_size: 4
reference:
  model_args: {disable_gradient_checkpointing: true}
  strategy_args:
    strategy_name: fsdp2_infer
    strategy_config: ~
  device_mapping: "[0, 1]"
actor_infer:
  strategy_args: {strategy_name: vllm}
)";

struct Parsed {
  RollWorker worker;
  Arguments arguments;
  std::string told;
};

Parsed parse_and_apply(const std::string& text, const std::string& role, int64_t ranks,
                       const std::function<void(Arguments&)>& flags = {}) {
  Parsed parsed;
  CollectedDiagnostics told;
  parsed.worker = parse_roll_worker(text, "x.yaml", role, parsed.arguments);
  if (flags) flags(parsed.arguments);
  apply_roll_worker(
      parsed.worker, parsed.arguments, ranks, [] { return 5000; }, told.sink());
  parsed.told = told.text();
  return parsed;
}

TEST(RollWorker, BecomesArgumentsAndSharding) {
  const auto [worker, arguments, told] = parse_and_apply(kPipeline, "actor_train", 16);
  EXPECT_TRUE(worker.trains);
  EXPECT_EQ(arguments.hf_model, "/models/tiny");
  EXPECT_EQ(arguments.seq_length, 16);
  EXPECT_EQ(arguments.seed, 7);
  EXPECT_EQ(arguments.lr, 1e-6);
  EXPECT_EQ(arguments.weight_decay, 0);
  EXPECT_EQ(arguments.lr_decay_style, LrDecayStyle::kCosine);
  EXPECT_EQ(arguments.micro_batch_size, 2);
  EXPECT_EQ(arguments.global_batch_size, 2 * 32 * 16);
  EXPECT_EQ(arguments.train_iters, 6) << "ceil(1.5 * (5000 / 1024))";
  EXPECT_EQ(arguments.lr_warmup_iters, 20);
  EXPECT_FALSE(arguments.save_interval) << "nothing is saved";
  const auto saving = [](Arguments& flags) { flags.save = "out"; };
  EXPECT_EQ(parse_and_apply(kPipeline, "actor_train", 16, saving).arguments.save_interval, 100);
  EXPECT_EQ(arguments.log_interval, 1);
  EXPECT_FALSE(arguments.load);
  EXPECT_FALSE(arguments.async_save) << "nothing is saved";
  EXPECT_TRUE(arguments.no_save_optim);
  EXPECT_TRUE(arguments.use_torch_fsdp2);
  EXPECT_FALSE(arguments.reduce_scatter_during_grad_accumulation);
  EXPECT_EQ(arguments.context_parallel_size, 1);
  EXPECT_FALSE(arguments.apply_tiled_mlp);
  EXPECT_EQ(arguments.recompute_granularity, RecomputeGranularity::kFull);
  EXPECT_THAT(arguments.freeze_module_prefix, ElementsAre("model.embed_tokens", "model.layers.0."));
  const auto& sharding = worker.sharding;
  EXPECT_EQ(sharding.sharding_size, 8);
  EXPECT_EQ(sharding.mixed_precision.param_dtype, at::kBFloat16);
  EXPECT_EQ(sharding.mixed_precision.reduce_dtype, at::kFloat);
  EXPECT_EQ(sharding.reshard_after_forward.kind, ReshardAfterForward::Kind::kAlways);
  EXPECT_TRUE(sharding.offload_to_cpu);
  ASSERT_TRUE(sharding.wrap_policy);
  EXPECT_THAT(*sharding.wrap_policy->layer_classes, ElementsAre("Qwen3Attention", "Qwen3MLP"));
  EXPECT_TRUE(sharding.wrap_policy->lm_output);
  EXPECT_FALSE(sharding.wrap_policy->embeddings);
  EXPECT_THAT(told, HasSubstr("2 * gradient_accumulation_steps 32 * 16 ranks are a global batch of "
                              "1024"));
  EXPECT_THAT(told, HasSubstr("num_train_epochs 1.5 of 5000 sequences, 1024 an iteration, are 6 "));
  EXPECT_THAT(told, HasSubstr("not used here: "));
  for (const auto* unused :
       {"actor_train.data_args", "actor_train.use_remove_padding", "exp_name", "actor_infer", "max_steps"})
    EXPECT_THAT(worker.unused, testing::Contains(unused));
}

TEST(RollWorker, HasRollsDefaults) {
  const auto [worker, arguments, told] = parse_and_apply("sft: {strategy_args: {strategy_config: {}}, model_args: ~}",
                                                         "sft", 4, [](Arguments& flags) { flags.save = "there"; });
  EXPECT_EQ(arguments.lr, 5e-5);
  EXPECT_EQ(arguments.seed, 42);
  EXPECT_EQ(arguments.global_batch_size, 8 * 4);
  EXPECT_EQ(arguments.train_iters, 5000 / 32);
  EXPECT_EQ(arguments.lr_decay_style, LrDecayStyle::kLinear);
  EXPECT_TRUE(arguments.async_save);
  EXPECT_TRUE(arguments.reduce_scatter_during_grad_accumulation);
  EXPECT_EQ(worker.sharding.sharding_size, std::nullopt) << "fsdp_size 1 is the whole world";
  EXPECT_EQ(worker.sharding.reshard_after_forward.kind, ReshardAfterForward::Kind::kDefault);
  EXPECT_EQ(worker.sharding.mixed_precision.param_dtype, at::kBFloat16);
  EXPECT_FALSE(worker.sharding.wrap_policy->layer_classes);
  EXPECT_FALSE(worker.recompute_reentrant);
}

TEST(RollWorker, FlagsOfTheCommandLineWin) {
  const auto parsed = parse_and_apply(kPipeline, "actor_train", 16, [](Arguments& flags) {
    flags.train_iters = 3;
    flags.global_batch_size = 64;
    flags.lr_warmup_iters = 1;
    flags.recompute_granularity = RecomputeGranularity::kSelective;
  });
  EXPECT_EQ(parsed.arguments.train_iters, 3);
  EXPECT_EQ(parsed.arguments.global_batch_size, 64);
  EXPECT_EQ(parsed.arguments.lr_warmup_iters, 1);
  EXPECT_EQ(parsed.arguments.recompute_method, std::nullopt);
  EXPECT_THAT(parsed.told, testing::Not(HasSubstr("epochs")));
}

TEST(RollWorker, InferenceTrainsNothing) {
  const auto parsed = parse_and_apply(kPipeline, "reference", 2);
  EXPECT_FALSE(parsed.worker.trains);
  EXPECT_EQ(parsed.arguments.train_iters, std::nullopt);
  EXPECT_EQ(parsed.worker.infer_batch_size, 16);
}

/// kPipeline with one line replaced.
std::string with(const std::string& line, const std::string& other) {
  std::string text = kPipeline;
  const auto place = text.find(line);
  EXPECT_NE(place, text.npos) << line;
  return text.replace(place, line.size(), other);
}

TEST(RollWorker, MistakesAreErrors) {
  struct Row {
    const char *line, *other, *message;
  };
  const Row rows[] = {
      {"fsdp_size: 8", "fsdp_siz: 8",
       "x.yaml:37: unknown key \"actor_train.strategy_args.strategy_config.fsdp_siz\"; did you mean "
       "fsdp_size?"},
      {"warmup_steps: 20", "warm_steps: 20", "did you mean warmup_steps?"},
      {"wrap_lm_output: true", "wrap_lm_outpt: true", "did you mean wrap_lm_output?"},
      {"device_mapping: list", "device_map: list", "did you mean device_mapping?"},
      {"strategy_name: fsdp2_train", "strategy_nam: fsdp2_train", "did you mean strategy_name?"},
      {"fsdp_size: 8", "ep_size: 3", "ep_size 3 must divide the number of ranks, 16"},
      {"fsdp_size: 8", "ep_size: 2\n      efsdp_size: 3",
       "ep_size 2 on 16 ranks leaves 8 with the same experts; efsdp_size, which is 3, must divide"},
      {"ulysses_size: 1", "lora_target: '.*_proj'", "is a pattern, .*_proj; list the names"},
      {"ulysses_size: 1", "lora_target: [q_proj, all-router]", "adapters are of linear layers only"},
      {"ulysses_size: 1", "lora_rank: 0", "takes a whole number of at least 1"},
      {"ulysses_size: 1", "additional_target: embed_tokens", "nothing but adapters is trained"},
      {"model_type: ~", "model_type: trl", "only a critic has another head here"},
      {"param_dtype: bf16", "param_dtype: int8", "param_dtype takes one of fp16, bf16, fp32, fp64, got"},
      {"fsdp_size: 8", "fsdp_size: many", "takes a whole number of at least -1, got \"many\"."},
      {"reshard_after_forward: true", "reshard_after_forward: 2", "takes true or false"},
      {"fsdp2_train", "megatron_train", "is megatron_train; this program runs workers of fsdp2_tr"},
      {"learning_rate: 1.0e-6", "learning_rate: quick",
       "x.yaml:25: actor_train.training_args.learning_rate: --lr takes a number, got \"quick\"."},
      {"lr_scheduler_type: cosine", "lr_scheduler_type: polynomial", "takes one of linear, cosine, "},
      {"pretrain: ${root}/tiny", "pretrain: ${rot}/tiny", "${rot} is no plain value of this file"},
      {"root: /models", "root: ${root}", "is no plain value"},
      {"list(range(0,16))", "__import__('os')", "it is read, not evaluated"},
      {"list(range(0,16))", "list(range(0,8))", "device_mapping is for 8 devices, but the run has 16"},
      {"fsdp_size: 8", "fsdp_size: 6", "fsdp_size 6 must divide the number of ranks, 16"},
      {"resume_from_checkpoint: false", "resume_from_checkpoint: true", "the folder of a checkpoi"},
      {"ulysses_size: 1", "ulysses_size: 32", "actor_train: ulysses_size 32 must divide the number of ranks, 16"},
      {"per_device_train_batch_size: 2", "per_device_train_batch_size: 0",
       "per_device_train_batch_size is 0; it must be at least 1."},
      {"fsdp_size: 8", "forward_prefetch: 2", "takes true or false"},
      {"wrap:\n          - Qwen3Attention\n          - Qwen3MLP", "wrap: []",
       "transformer_layer_cls_to_wrap is an empty list; name classes of layers, or leave it out"},
      {"fsdp_size: 8", "ep_size: 0", "ep_size is 0; it is a number of ranks, so at least 1."},
      {"dtype: bf16", "dtype: bf16\n    dtype: bf16", "dtype is given twice"},
  };
  for (const auto& [line, other, message] : rows) {
    const auto text = with(line, other);
    EXPECT_THAT(usage_error([&] { parse_and_apply(text, "actor_train", 16); }), HasSubstr(message)) << other;
  }
  EXPECT_THAT(usage_error([] { parse_and_apply(kPipeline, "actor", 16); }),
              HasSubstr("has no such worker; it has actor_train, reference, actor_infer."));
  Arguments arguments;
  EXPECT_THAT(usage_error([&] { read_roll_worker("/", "actor", arguments); }),
              HasSubstr("--config / cannot be read: it is a folder"));
}

TEST(RollWorker, MessagesAboutFlagsHaveTheKeysToo) {
  EXPECT_EQ(with_roll_keys("--save x needs --save-interval."),
            "--save x needs --save-interval. In ROLL's file: save_steps for --save-interval.");
  EXPECT_EQ(with_roll_keys("--lr-warmup-iters is for --lr and --seq-length."),
            "--lr-warmup-iters is for --lr and --seq-length. In ROLL's file: learning_rate for --lr, sequence_length "
            "for --seq-length.");
  EXPECT_EQ(with_roll_keys("--save-hf needs --hf-models"), "--save-hf needs --hf-models");
}

TEST(RollWorker, DtypesAreSpeltAsInRoll) {
  for (const auto& [name, dtype] : {std::pair("half", at::kHalf), std::pair("float", at::kFloat),
                                    std::pair("BF16", at::kBFloat16), std::pair("bfloat16", at::kBFloat16)}) {
    const auto text = with("param_dtype: bf16", std::string("param_dtype: ") + name);
    const auto read = parse_and_apply(text, "actor_train", 16);
    EXPECT_EQ(read.worker.sharding.mixed_precision.param_dtype, dtype) << name;
  }
}

TEST(RollWorker, EveryKeySaysWhatItTakes) {
  const std::string file = "x.yaml";
  using enum RollPipeline;
  for (const auto& keys :
       {roll_pipeline_keys(), roll_worker_keys(), roll_model_keys(), roll_training_keys(), roll_strategy_keys(),
        roll_wrap_keys(), roll_loss_keys(kPairs), roll_loss_keys(kAnswers), roll_loss_worker_keys(kAnswers)}) {
    for (const auto& key : keys) {
      if (key.take == nullptr) continue;
      RollWorker worker;
      Arguments arguments;
      const YamlValue value{file, key.name, YAML::Load("[[seven]]")};
      const auto message = usage_error([&] { key.take(value, worker, arguments); });
      EXPECT_THAT(message, testing::ContainsRegex(std::string("x.yaml:1: ") + key.name + ":? .*takes "));
    }
  }
}

/// strategy_config in the files of ROLL's examples: the keys about experts.
Parsed with_experts(const std::string& keys, int64_t ranks) {
  return parse_and_apply("sft_train:\n  model_args: {ulysses_size: 2}\n  strategy_args:\n"
                         "    strategy_config: {param_dtype: bf16, reduce_dtype: bf16, "
                         "moe_use_grouped_mm: false, " +
                             keys + "}\n",
                         "sft_train", ranks);
}

TEST(RollWorker, ExpertsOnRanksAndInGroupsOfTheirOwn) {
  const std::string stacked = "wrap_policy: {moe_experts: [Qwen3MoeExperts]}";
  const std::string each = "wrap_policy: {moe_experts: [Qwen3MoeMLP]}";
  const auto eight = with_experts("fsdp_size: 8, efsdp_size: 1, ep_size: 8, " + stacked, 8);
  EXPECT_EQ(eight.arguments.expert_model_parallel_size, 8);
  EXPECT_EQ(eight.worker.sharding.sharding_size, std::nullopt);
  EXPECT_THAT(eight.worker.sharding.wrap_policy->expert_classes, ElementsAre("Qwen3MoeExperts"));
  const auto shared = with_experts("fsdp_size: 32, efsdp_size: 4, ep_size: 8, " + stacked, 32);
  EXPECT_EQ(shared.arguments.expert_model_parallel_size, 8);
  EXPECT_EQ(shared.worker.sharding.expert_shard_size, 4);
  EXPECT_EQ(with_experts("ep_size: 4, " + stacked, 8).worker.sharding.expert_shard_size, 1);

  for (const char* patch : {"apply_expert_patch: true, ", "apply_expert_patch: false, ", ""}) {
    const auto patched = with_experts(patch + each, 8);
    EXPECT_THAT(patched.worker.sharding.wrap_policy->expert_classes, ElementsAre("Qwen3MoeMLP")) << patch;
    EXPECT_EQ(patched.arguments.expert_model_parallel_size, 1);
  }
  EXPECT_THAT(with_experts("efsdp_size: 2, " + each, 8).told, HasSubstr("efsdp_size, for ep_size is 1"));
}

/// The workers of ROLL's examples with these strategies, reduced to the keys that differ.
TEST(RollWorker, ExamplesOfRollAreReadAsTheyAre) {
  struct Example {
    const char* name;
    const char* model_args;
    const char* config;
    const char* wrap;
    int64_t ranks;
    int64_t tiles = 0, expert_ranks = 1, sequence_ranks = 1;
    std::vector<std::string> experts{};
  };
  const char* moe = "transformer_layer_cls_to_wrap: [Qwen3MoeAttention, Qwen3MoeSparseMoeBlock], "
                    "moe_experts: [Qwen3MoeMLP]";
  const char* stacked = "transformer_layer_cls_to_wrap: [Qwen3MoeAttention, "
                        "Qwen3MoeSparseMoeBlock], moe_experts: [Qwen3MoeExperts]";
  const Example examples[] = {
      {"qwen3-8B-rlvr", "", "apply_tiled_mlp: true, tiled_num_shards: 8",
       "transformer_layer_cls_to_wrap: [Qwen3Attention, Qwen3MLP]", 16, 8},
      {"qwen2_5-vl-3B-rlvr", "freeze_module_prefix: model.visual", "offload_policy: false", "", 8},
      {"qwen2.5-7B on two ranks a sequence", "ulysses_size: 2", "offload_policy: false", "", 8, 0, 1, 2},
      {"qwen3-30BA3B-rlvr", "ulysses_size: 4", "fsdp_size: 32", moe, 32, 0, 1, 4, {"Qwen3MoeMLP"}},
      {"qwen3-30BA3B-rlvr with ep",
       "ulysses_size: 4",
       "fsdp_size: 32, efsdp_size: 4, ep_size: 8, moe_use_grouped_mm: false",
       stacked,
       32,
       0,
       8,
       4,
       {"Qwen3MoeExperts"}},
      {"qwen3-30BA3B-agentic",
       "ulysses_size: 2",
       "offload_policy: true, apply_expert_patch: true, apply_tiled_mlp: true, tiled_num_shards: 4",
       moe,
       32,
       4,
       1,
       2,
       {"Qwen3MoeMLP"}},
      {"ascend 30B",
       "",
       "offload_policy: true, apply_expert_patch: true, apply_tiled_mlp: true, "
       "tiled_num_shards: 8",
       moe,
       16,
       8,
       1,
       1,
       {"Qwen3MoeMLP"}},
      {"qwen3.5-35BA3-sft with ep",
       "ulysses_size: 1",
       "fsdp_size: 8, efsdp_size: 1, ep_size: 8, moe_use_grouped_mm: false, "
       "apply_expert_patch: false, apply_tiled_mlp: false",
       "transformer_layer_cls_to_wrap: [Qwen3_5MoeAttention, Qwen3_5MoeSparseMoeBlock], "
       "moe_experts: [Qwen3_5MoeExperts]",
       8,
       0,
       8,
       1,
       {"Qwen3_5MoeExperts"}},
  };
  for (const auto& each : examples) {
    for (const char* strategy : {"fsdp2_train", "fsdp2_infer"}) {
      SCOPED_TRACE(std::string(each.name) + " " + strategy);
      const std::string text = std::string("worker:\n  model_args: {dtype: bf16, model_type: ~, ") + each.model_args +
                               "}\n  strategy_args:\n    strategy_name: " + strategy +
                               "\n    strategy_config: {param_dtype: bf16, reduce_dtype: bf16, reshard_after_forward: "
                               "true, wrap_policy: {wrap_embeddings: true, wrap_lm_output: true, " +
                               each.wrap + "}, " + each.config + "}\n  device_mapping: list(range(0," +
                               std::to_string(each.ranks) + "))\n  infer_batch_size: 2\n";
      const auto [worker, arguments, told] = parse_and_apply(text, "worker", each.ranks);
      EXPECT_EQ(arguments.apply_tiled_mlp, each.tiles > 0);
      EXPECT_EQ(arguments.tiled_num_shards, each.tiles > 0 ? each.tiles : 4);
      EXPECT_EQ(arguments.expert_model_parallel_size, each.expert_ranks);
      EXPECT_EQ(arguments.context_parallel_size, each.sequence_ranks);
      EXPECT_EQ(worker.sharding.wrap_policy->expert_classes, each.experts);
      EXPECT_EQ(worker.sharding.sharding_size, std::nullopt);
    }
  }
}

TEST(RollWorker, AdaptersComeFromTheModelArguments) {
  const auto lora = [](const std::string& keys, const std::string& strategy = "fsdp2_train") {
    return parse_and_apply("lora_target: o_proj,q_proj\nlora_rank: 32\n"
                           "actor: {model_args: {freeze_module_prefix: model, " +
                               keys + "}, strategy_args: {strategy_name: " + strategy + "}}",
                           "actor", 2);
  };
  const auto named = lora("lora_target: '${lora_target}', lora_rank: '${lora_rank}', lora_alpha: 32");
  EXPECT_EQ(named.arguments.lora_r, 32);
  EXPECT_EQ(named.arguments.lora_alpha, 32);
  EXPECT_THAT(named.arguments.lora_target_modules, ElementsAre("o_proj", "q_proj"));
  EXPECT_TRUE(named.arguments.freeze_module_prefix.empty());
  EXPECT_THAT(named.told, HasSubstr("actor.model_args.freeze_module_prefix"));
  const auto all = lora("lora_target: all, lora_dropout: 0.1");
  EXPECT_EQ(all.arguments.lora_r, 8);
  EXPECT_EQ(all.arguments.lora_alpha, 16);
  EXPECT_EQ(all.arguments.lora_dropout, 0.1);
  EXPECT_THAT(all.arguments.lora_target_modules, ElementsAre("all-linear"));
  const auto infer = lora("lora_target: all", "fsdp2_infer");
  EXPECT_EQ(infer.arguments.lora_r, std::nullopt);
  EXPECT_TRUE(infer.arguments.lora_target_modules.empty());
  EXPECT_FALSE(infer.arguments.freeze_module_prefix.empty());
  EXPECT_EQ(lora("lora_rank: 4").arguments.lora_r, std::nullopt) << "no lora_target";
}

TEST(RollWorker, KeysThatRollDropsCountAndAreTold) {
  const auto parsed =
      parse_and_apply("actor: {model_args: {lora_target: q_proj, lora_r: 16, max_pixels: 100, min_pixels: "
                      "4}, training_args: {logging_steps: 3, eval_steps: 4, max_grad_norm: 0.5, max_steps: "
                      "9}, strategy_args: {strategy_config: {forward_prefetch: true}}}",
                      "actor", 2);
  EXPECT_EQ(parsed.arguments.lora_r, 16);
  EXPECT_EQ(parsed.arguments.lora_alpha, 32);
  EXPECT_EQ(parsed.arguments.log_interval, 3);
  EXPECT_EQ(parsed.arguments.eval_interval, 4);
  EXPECT_EQ(parsed.arguments.clip_grad, 0.5);
  EXPECT_EQ(parsed.worker.sharding.num_to_forward_prefetch, 1);
  EXPECT_EQ(parsed.worker.image_pixels.at("--image-max-pixels"), 100);
  EXPECT_EQ(parsed.worker.image_pixels.at("--image-min-pixels"), 4);
  EXPECT_THAT(parsed.told, HasSubstr("though ROLL itself drops them: "));
  for (const auto* key : {"model_args.lora_r", "model_args.max_pixels", "training_args.logging_steps"})
    EXPECT_THAT(parsed.told, HasSubstr(std::string("actor.") + key));
  const auto both =
      parse_and_apply("logging_steps: 7\nactor: {model_args: {lora_target: q_proj, lora_rank: 4, lora_r: 16}, "
                      "training_args: {logging_steps: 3}, strategy_args: {}}",
                      "actor", 2);
  EXPECT_EQ(both.arguments.lora_r, 4) << "lora_rank is what ROLL reads";
  EXPECT_EQ(both.arguments.log_interval, 7) << "and the pipeline's";
}

TEST(RollWorker, SchedulesAndDecayAreRolls) {
  const auto train = [](const std::string& keys) {
    return parse_and_apply("actor: {training_args: {" + keys + "}, strategy_args: {}}", "actor", 2).arguments;
  };
  const auto longer = train("max_steps: 5, warmup_steps: 20");
  EXPECT_EQ(longer.lr_warmup_iters, 20);
  EXPECT_EQ(longer.lr_decay_iters, 21) << "behind the run";
  EXPECT_EQ(train("max_steps: 50, warmup_steps: 20").lr_decay_iters, std::nullopt);
  EXPECT_THAT(train("max_steps: 5, weight_decay: 0.1").param_group_overrides, ElementsAre("*:wd_mult=1"));
  EXPECT_TRUE(train("max_steps: 5, weight_decay: 0").param_group_overrides.empty());
}

TEST(RollWorker, DeviceMappingsAreParsed) {
  const auto size = [](const std::string& text) {
    const auto devices = parse_device_mapping(text);
    return devices ? static_cast<int64_t>(devices->size()) : -1;
  };
  EXPECT_THAT(parse_and_apply("a: {device_mapping: '[3, 1]', training_args: {max_steps: 1}, strategy_args: {}}", "a", 2)
                  .worker.device_mapping,
              ElementsAre(3, 1))
      << "the GPUs of ranks 0 and 1";
  EXPECT_THAT(*parse_device_mapping("list(range(2, 5))"), ElementsAre(2, 3, 4));
  EXPECT_THAT(*parse_device_mapping(" [ 0,1 ] + list(range(4,8,2))"), ElementsAre(0, 1, 4, 6));
  EXPECT_EQ(size("list(range(16))"), 16);
  EXPECT_EQ(size("range(0, 16)"), 16);
  EXPECT_EQ(size("list([3])"), 1);
  for (const auto* wrong : {"", "16", "list(range(0,16)", "list(range())", "range(1,2,3,4)", "[0,0]", "[0,]", "[-1]",
                            "range(0,4,0)", "list(range(0,4)) or 1", "[0] +", "range(0,99999999999)", "[1e3]"}) {
    EXPECT_EQ(size(wrong), -1) << wrong;
  }
}

}  // namespace
}  // namespace megashard
