#include "launch/arguments/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

CommandLine parsed(const std::string& line) {
  std::istringstream stream("pretrain " + line);
  std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
  std::vector<const char*> argv;
  for (const auto& word : words) argv.push_back(word.c_str());
  return parse_arguments(static_cast<int>(argv.size()), argv.data());
}

Arguments parse(const std::string& line) {
  auto result = parsed(line);
  result.mistakes.throw_if_any();
  return result.arguments;
}

std::string refusal(const std::string& line) {
  return usage_error([&] { parse(line); });
}

/// A file that is removed with this object.
struct TemporaryFile {
  explicit TemporaryFile(const std::string& text)
      : path((std::filesystem::path(testing::TempDir()) /
              ("megashard_args_" + std::to_string(reinterpret_cast<std::uintptr_t>(this)) + ".yaml"))
                 .string()) {
    std::ofstream(path) << text;
  }
  ~TemporaryFile() { std::filesystem::remove(path); }
  std::string path;
};

TEST(CommandLine, ReadsFlagsInEverySpelling) {
  const auto arguments =
      parse("--num-layers 12 --hidden_size=64 --lr 1e-4 --min-lr=-0.5 --swiglu --disable-bias-linear "
            "--rampup-batch-size 8 8 100 --data-path 0.5 a 0.5 b --override-opt_param-scheduler "
            "--persistent-save-interval 7 --bf16=false");
  EXPECT_EQ(arguments.num_layers, 12);
  EXPECT_EQ(arguments.hidden_size, 64);
  EXPECT_EQ(arguments.lr, 1e-4);
  EXPECT_EQ(arguments.min_lr, -0.5);
  EXPECT_TRUE(arguments.swiglu);
  EXPECT_FALSE(arguments.add_bias_linear);
  EXPECT_THAT(arguments.rampup_batch_size, ElementsAre(8, 8, 100));
  EXPECT_THAT(arguments.data_path, ElementsAre("0.5", "a", "0.5", "b"));
  EXPECT_TRUE(arguments.override_opt_param_scheduler);
  EXPECT_EQ(arguments.save_interval, 7);
  EXPECT_FALSE(arguments.bf16);
  EXPECT_EQ(parse("--seed -1").seed, -1) << "negative numbers are values";
  EXPECT_EQ(parse("").seed, 1234);
}

TEST(CommandLine, MistakesAreErrors) {
  const std::pair<const char*, const char*> rows[] = {
      {"--train-iter 5", "unknown flag --train-iter; did you mean --train-iters?"},
      {"--zzz", "unknown flag --zzz; `megashard pretrain --help` lists all."},
      {"--hlep", "unknown flag --hlep; did you mean --help?"},
      {"--lr fast", "--lr takes a number, got \"fast\""},
      {"--lr", "--lr has no value"},
      {"--save --load x", "--save has no value"},
      {"--save= --load x", "--save has an empty value; is a variable of the script unset?"},
      {"--data-path --lr 1", "--data-path has no value"},
      {"--rampup-batch-size 1 2", "--rampup-batch-size takes 3 values, got 2."},
      {"- --lr 1", "unexpected word \"-\"; values follow their flag"},
      {"--lr 1 2", "unexpected word \"2\" after --lr; values follow their flag"},
      {"--swiglu yes", "unexpected word \"yes\" after --swiglu"},
      {"--swiglu False", "unexpected word \"False\" after --swiglu; a switch takes none: write "
                         "--swiglu=false."},
      {"--swiglu true", "a switch takes none: leave it out."},
      {"--swiglu=yes", "--swiglu takes no value (or true / false), got \"yes\""},
      {"-lr 1", "unknown flag -lr; did you mean --lr?"},
      {"--seed 1 \u2014lr 1", "after --seed; flags begin with two plain hyphens"},
      {"--save-rng", "unknown flag --save-rng; leave it out: only --no-save-rng changes that."},
      {"--no-swiglu", "unknown flag --no-swiglu; leave it out: it is off unless --swiglu is given."},
      {"--no-lrr 1", "unknown flag --no-lrr; `megashard"},
      {"--grad-reduce-in-bf16", "--grad-reduce-in-bf16 is refused"},
      {"--calculate-token-loss", "--calculate-token-loss is refused"},
      {"--ckpt-format dcp", "--ckpt-format takes one of torch_dist, torch_dcp, got \"dcp\""},
      {"--data-args-path /nowhere", "--data-args-path /nowhere cannot be read"},
      {"/nowhere.yaml", "the argument file /nowhere.yaml cannot be read"},
      {"--config /nowhere.yaml", "the argument file /nowhere.yaml cannot be read"},
      {"--config /", "the argument file / cannot be read: it is a folder"},
      {"--config", "--config has no value; write --config FILE."},
      {"a.yaml --config b.yaml", "are both YAML files"},
  };
  for (const auto& [line, message] : rows) EXPECT_THAT(refusal(line), HasSubstr(message)) << line;
}

TEST(CommandLine, TellsAllMistakesAtOnce) {
  EXPECT_EQ(refusal("--train-iter 5 --grad-reduce-in-bf16 --lr fast --optimizer dist_muon --seed 1 2 --save"),
            "6 things must change:\n"
            "  unknown flag --train-iter; did you mean --train-iters?\n"
            "  --grad-reduce-in-bf16 is refused: with FSDP2 gradients are reduced in the file's reduce_dtype; set "
            "reduce_dtype: bf16 there.\n"
            "  --lr takes a number, got \"fast\".\n"
            "  --optimizer dist_muon is refused: muon shards its states and shares its work as they are; use muon.\n"
            "  --save has no value; write --save DIR.\n"
            "  unexpected word \"2\" after --seed; values follow their flag, and `megashard "
            "pretrain --help` shows how many each takes.");
}

// Launch scripts end with "$@".
TEST(CommandLine, TheLastOfAFlagThatIsGivenTwiceCounts) {
  const auto again = [](const std::string& line) { return parsed(line).notices; };
  EXPECT_EQ(parse("--num-layers 2 --seed 1 --num_layers=3").num_layers, 3);
  EXPECT_THAT(again("--num-layers 2 --num_layers=3"),
              ElementsAre("--num-layers is given twice, as 2 and as 3; the last one counts."));
  EXPECT_EQ(parse("--save-interval 2 --persistent-save-interval 4").save_interval, 4);
  EXPECT_THAT(again("--save-interval 2 --persistent-save-interval 2 --swiglu --swiglu"), ElementsAre());
  EXPECT_FALSE(parse("--swiglu --swiglu=false").swiglu);
  EXPECT_THAT(again("--data-path a --data-path b c"),
              ElementsAre("--data-path is given twice, as a and as b c; the last one counts."));
  EXPECT_THAT(again("--lr fast --lr 1"), testing::SizeIs(1)) << "the first is never read";
}

TEST(CommandLine, HelpComesFromTheTable) {
  try {
    parse("--num-layers 2 --help");
    FAIL() << "help was not requested";
  } catch (const HelpRequested& help) {
    EXPECT_THAT(help.what(), HasSubstr("--config FILE"));
    EXPECT_THAT(help.what(),
                HasSubstr("--eval-iters INT\n      global batches of one evaluation; 0: none; not negative [100]"));
    EXPECT_THAT(help.what(), HasSubstr("known, but refused:"));
  }
}

TEST(CommandLine, HelpOfAGroup) {
  const auto help_of = [](const std::string& line) -> std::string {
    try {
      parse(line);
    } catch (const HelpRequested& help) {
      return help.what();
    }
    return "";
  };
  for (const char* line : {"--help learning rate", "--seed 1 --help learning-rate"}) {
    const auto help = help_of(line);
    EXPECT_THAT(help, testing::StartsWith("learning rate:\n"));
    EXPECT_THAT(help, HasSubstr("\n  --lr FLOAT\n"));
    EXPECT_THAT(help, testing::Not(testing::AnyOf(HasSubstr("--num-layers"), HasSubstr("refused"))));
  }
  EXPECT_THAT(help_of("--help --lr 1"), HasSubstr("--num-layers")) << "of a line that is to be run";
  EXPECT_THAT(help_of("--help --lr"), HasSubstr("\n  --lr FLOAT\n"));
  EXPECT_THAT(help_of("--help --lr"), testing::Not(HasSubstr("--num-layers"))) << "of one flag";
  EXPECT_THAT(help_of("--help --world_size"), testing::StartsWith("  --world-size INT\n"));
  EXPECT_THAT(help_of("--help lora-r"), HasSubstr("\n  --lora-r INT\n"));
  EXPECT_THAT(refusal("--help --lrr"), HasSubstr("--help --lrr: there is no such flag; did you mean --lr?"));
  EXPECT_THAT(refusal("--help zebras"), HasSubstr("no flag has these words"));
  EXPECT_THAT(refusal("--help optimiser"),
              HasSubstr("--help optimiser: there is no such group of flags; did you mean optimizer?"));
}

TEST(CommandLine, NamesOfOthersAreAnsweredWithOurs) {
  EXPECT_EQ(refusal("--learning_rate 1"), "unknown flag --learning_rate; here it is --lr.");
  const TemporaryFile file("learning_rate: 0.5\n");
  EXPECT_THAT(refusal(file.path), HasSubstr(":1: unknown key \"learning_rate\"; here it is --lr."));
}

TEST(CommandLine, SwitchesOfAProgramTakeNoValue) {
  EXPECT_TRUE(parsed("--dry-run").own.contains(kDryRun));
  EXPECT_TRUE(parsed("--dry_run=true").own.contains(kDryRun));
  EXPECT_FALSE(parsed("--dry-run=false").own.contains(kDryRun));
  EXPECT_EQ(refusal("--dry-run true"), "unexpected word \"true\" after --dry-run; a switch takes none: leave it out.");
  EXPECT_EQ(refusal("--dry-run=yes"), "--dry-run takes no value (or true / false), got \"yes\".");
  EXPECT_EQ(parsed("--world-size 8").own_value(kWorldSize, "1"), "8");
  EXPECT_EQ(parsed("").own_value(kWorldSize, "1"), "1");
}

TEST(CommandLine, ArgumentsKnowWhereTheyWereGiven) {
  const TemporaryFile file("lr: 0.5\nseed: 3\n");
  const auto arguments = parse(file.path + " --seed 4");
  EXPECT_EQ(arguments.given.at("lr"), file.path + ":1");
  EXPECT_EQ(arguments.given.at("seed"), "command line");
  EXPECT_FALSE(arguments.is_given("num_layers"));
}

TEST(ArgumentFile, ReadsMegatronsSection) {
  const TemporaryFile file(R"(
gpt_args:
  num_layers: 12   # comment
  lr: 1.0e-5
  min_lr: "1e-6"
  swiglu: true
  bf16: False
  no_gradient_accumulation_fusion: True
  add_bias_linear: false
  override_opt_param_scheduler: true
  data_path: [0.3, a, 0.7, b]
  train_data_path: one
  load: null
  use_flash_attn: true
)");
  const auto arguments = parse(file.path + " --num-layers 3");
  EXPECT_EQ(arguments.num_layers, 3) << "the command line wins";
  EXPECT_EQ(arguments.lr, 1e-5);
  EXPECT_EQ(arguments.min_lr, 1e-6);
  EXPECT_TRUE(arguments.swiglu);
  EXPECT_FALSE(arguments.bf16);
  EXPECT_FALSE(arguments.gradient_accumulation_fusion);
  EXPECT_FALSE(arguments.add_bias_linear);
  EXPECT_TRUE(arguments.override_opt_param_scheduler);
  EXPECT_THAT(arguments.data_path, ElementsAre("0.3", "a", "0.7", "b"));
  EXPECT_THAT(arguments.train_data_path, ElementsAre("one"));
  EXPECT_FALSE(arguments.load.has_value());
  EXPECT_THAT(arguments.given_without_effect, ElementsAre("--no-gradient-accumulation-fusion", "--use-flash-attn"));
}

// Written as MindSpeed-MM's qwen3vl_full_sft_8B.yaml.
TEST(ArgumentFile, ReadsMindSpeedsFile) {
  const TemporaryFile file(R"(
HF_MODEL_LOAD_PATH: &HF_MODEL_LOAD_PATH ./ckpt/tiny
FSDP2_PATH: &FSDP2_PATH ./fsdp2_config.yaml
gpt_args:
  context_parallel_size: 1
  context_parallel_algo: ulysses_cp_algo
  use_torch_fsdp2: true
  fsdp2_config_path: *FSDP2_PATH
  ckpt_format: torch_dcp
  clip_grad: 0.0
  micro_batch_size: 1
  optimizer_selection: fused_torch_adamw
  lr: 1.0e-5
  lr_warmup_fraction: 0.1
  no_load_optim: true  # a comment
  log_tps: true
  use_cpu_initialization: true
  init_model_with_meta_device: true
  normalization: RMSNorm
  use_fused_rmsnorm: true
  swiglu: true
  use_fused_swiglu: true
  use_flash_attn: true
  tokenizer_type: NullTokenizer
  no_gradient_accumulation_fusion: true
  untie_embeddings_and_output_weights: true
  no_masked_softmax_fusion: true
data:
  dataset_param:
    dataset_type: huggingface
    preprocess_parameters: {model_name_or_path: *HF_MODEL_LOAD_PATH}
    basic_parameters: {template: qwen3_vl_nothink, dataset: chats.json}
model:
  model_id: qwen3_vl
  init_from_hf_path: *HF_MODEL_LOAD_PATH
)");
  const auto arguments = parse(file.path);
  EXPECT_EQ(arguments.fsdp2_config_path, "./fsdp2_config.yaml");
  EXPECT_EQ(arguments.lr_warmup_fraction, 0.1);
  EXPECT_TRUE(arguments.untie_embeddings_and_output_weights);
  EXPECT_THAT(arguments.unread_sections, ElementsAre("FSDP2_PATH", "HF_MODEL_LOAD_PATH"));
  const TemporaryFile roll("actor_train: {strategy_args: {strategy_name: fsdp2_train}}");
  EXPECT_THAT(refusal(roll.path), HasSubstr("is a configuration of ROLL; name the worker to run"));
  EXPECT_THAT(refusal("--role actor_train"), HasSubstr("--role actor_train needs --config"));
}

// Written as qwen3vl_lora_sft_30B.yaml.
TEST(ArgumentFile, ReadsTheSectionOfAdapters) {
  const TemporaryFile file(R"(
gpt_args:
  lr: 1.0e-5
lora_args:
  lora_r: 4
  lora_alpha: 32
  lora_dropout: 0.0
  lora_target_modules: v_proj,o_proj
  lora_register_forward_hook: embed_tokens
)");
  const auto arguments = parse(file.path + " --lora-alpha 8");
  EXPECT_EQ(arguments.lora_r, 4);
  EXPECT_EQ(arguments.lora_alpha, 8);
  EXPECT_THAT(arguments.lora_target_modules, ElementsAre("v_proj", "o_proj"));
  EXPECT_TRUE(arguments.unread_sections.empty());
  const TemporaryFile wrong("gpt_args: {lr: 1}\nlora_args: {lora_rr: 4}");
  EXPECT_THAT(refusal(wrong.path), HasSubstr(":2: unknown key \"lora_args.lora_rr\"; did you mean lora_r?"));
}

TEST(ArgumentFile, MayBeFlatAndNamedByConfig) {
  const TemporaryFile file("num_layers: 4\ndisable_bias_linear: false\n");
  const auto arguments = parse("--seed 5 --config " + file.path);
  EXPECT_EQ(arguments.num_layers, 4);
  EXPECT_EQ(arguments.seed, 5);
  EXPECT_TRUE(arguments.add_bias_linear);
}

TEST(ArgumentFile, MistakesNameLineAndKey) {
  const std::pair<const char*, const char*> rows[] = {
      {"num_layers: 2\nnum_layer: 3", ":2: unknown key \"num_layer\"; did you mean num_layers?"},
      {"world_size: 3", "unknown key \"world_size\""},
      {"num_layers: two", ":1: --num-layers takes a whole number, got \"two\""},
      {"swiglu: 7", ":1: swiglu takes true or false"},
      {"num_layers: {a: 1}", "num_layers takes a value or a list of plain values, got a map"},
      {"data_path: [[a]]", "data_path takes a value or a list of plain values"},
      {"num_layers: [1, 2]", "--num-layers takes one value, got 2"},
      {"num_layers: 2\nnum_layers: 2", ":2: num_layers is given twice"},
      {"gpt_args: {seed: 1}\ngpt_args: {lr: 2}", ":2: gpt_args is given twice; keep one."},
      {"gpt_args: {}\nlora_args:\n  lora_r: 8\n  lora_r: 4", ":4: lora_r is given twice"},
      {"gpt_args: {seed: 1}\nlr: 2", ":2: \"lr\" stands beside gpt_args"},
      {"gpt_args: 3", "the file must hold `key: value` lines"},
      {"- a", "the file must hold `key: value` lines"},
      {"a: [", "this is not YAML"},
      {"grad_reduce_in_bf16: true", "--grad-reduce-in-bf16 is refused"},
      {"train_iters: 2\ntrain-iters: 2", ":2: train-iters and train_iters in line 1 mean the same; keep one."},
      {"disable_bias_linear: true\nlr: 1\nadd_bias_linear: true",
       ":3: add_bias_linear and disable_bias_linear in line 1 mean the same"},
      {"gpt_args: {lora_r: 4}\nlora_args: {lora_r: 4}", ":2: lora_r and lora_r in line 1"},
      {"no_save_rgn: true", "did you mean no_save_rng?"},
  };
  for (const auto& [text, message] : rows) {
    const TemporaryFile file(text);
    EXPECT_THAT(refusal(file.path), HasSubstr(message)) << text;
  }
}

TEST(ArgumentFile, TellsAllMistakesAtOnce) {
  const TemporaryFile file("gpt_args:\n  num_layer: 2\n  lr: fast\n  seed: 1\n  grad_reduce_in_bf16: true\n");
  EXPECT_EQ(refusal(file.path + " --zzz"),
            "4 things must change:\n  unknown flag --zzz; `megashard pretrain --help` lists all.\n  " + file.path +
                ":2: unknown key \"num_layer\"; did you mean num_layers?\n  " + file.path +
                ":3: --lr takes a number, got \"fast\".\n  " + file.path +
                ":5: --grad-reduce-in-bf16 is refused: with FSDP2 gradients are reduced in the file's reduce_dtype; "
                "set reduce_dtype: bf16 there.");
}

TEST(DataArgsPath, ReplacesTheWordsOfDataPath) {
  const TemporaryFile file("0.25 a\n0.75 b\n");
  EXPECT_THAT(parse("--data-args-path " + file.path).data_path, ElementsAre("0.25", "a", "0.75", "b"));
}

}  // namespace
}  // namespace megashard
