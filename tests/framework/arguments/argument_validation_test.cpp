#include "framework/arguments/argument_validation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "framework/arguments/activation_plan.h"
#include "framework/arguments/argument_table.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// Sets "--flag word word --other ..." on top of a set that is valid.
Arguments arguments_from(const std::string& flags) {
  Arguments arguments;
  arguments.num_layers = 2;
  arguments.hidden_size = 96;
  arguments.num_attention_heads = 4;
  arguments.max_position_embeddings = 64;
  arguments.seq_length = 64;
  arguments.micro_batch_size = 2;
  arguments.train_iters = 10;
  arguments.lr = 1e-3;
  arguments.vocab_size = 100;
  arguments.mock_data = true;
  arguments.use_torch_fsdp2 = true;
  std::istringstream words(flags);
  std::vector<std::string> values;
  const Option* option = nullptr;
  const auto store = [&] {
    if (option != nullptr) set_option(*option, values, arguments);
    values.clear();
  };
  for (std::string word; words >> word;) {
    if (word.starts_with("--")) {
      store();
      option = find_option(word);
      EXPECT_NE(option, nullptr) << word;
    } else {
      values.push_back(word == "''" ? "" : word);
    }
  }
  store();
  return arguments;
}

struct Validated {
  Arguments arguments;
  CollectedDiagnostics told;
};

Validated validated(const std::string& flags, const RunEnvironment& environment = {}) {
  Validated result{arguments_from(flags), {}};
  validate_arguments(result.arguments, environment, result.told.sink());
  return result;
}

std::string refusal(Arguments arguments, const RunEnvironment& environment = {}) {
  CollectedDiagnostics told;
  return usage_error([&] { validate_arguments(arguments, environment, told.sink()); });
}

TEST(ValidateArguments, DerivesWhatWasNotGiven) {
  const auto plain = validated("", {.world_size = 4}).arguments;
  EXPECT_EQ(plain.ffn_hidden_size, 384);
  EXPECT_EQ(plain.kv_channels, 24);
  EXPECT_EQ(plain.data_parallel_size, 4);
  EXPECT_EQ(plain.global_batch_size, 8);
  EXPECT_EQ(plain.padded_vocab_size, 128);
  EXPECT_EQ(plain.start_weight_decay, 0.01);
  EXPECT_EQ(plain.split, "969, 30, 1");
  EXPECT_EQ(plain.distributed_backend, "gloo");
  EXPECT_EQ(plain.params_dtype, "fp32");
  EXPECT_TRUE(plain.add_qkv_bias) << "biases of linear layers include those of the projection";

  const auto gated = validated("--swiglu --disable-bias-linear --use-rotary-position-embeddings").arguments;
  EXPECT_EQ(gated.ffn_hidden_size, 256) << "int(4 * 96 * 2 / 3 / 64) * 64";
  EXPECT_FALSE(gated.add_qkv_bias);
  EXPECT_EQ(gated.position_embedding_type, PositionEmbeddingType::kRope);
  EXPECT_EQ(validated("--tokenizer-type NullTokenizer --vocab-size 128").arguments.padded_vocab_size, 256);
  EXPECT_EQ(validated("", {.has_gpu = true}).arguments.distributed_backend, "nccl");
  EXPECT_EQ(validated("--device cpu", {.has_gpu = true}).arguments.distributed_backend, "gloo");
}

TEST(ValidateArguments, TokensOfAVocabularyFileAreCounted) {
  const TemporaryFolder folder;
  const auto file = folder.file("vocab.json");
  const auto with = [&](const std::string& text) {
    std::ofstream(file) << text;
    auto arguments = arguments_from("--tokenizer-type GPT2BPETokenizer --vocab-file " + file);
    arguments.vocab_size.reset();
    return arguments;
  };
  auto arguments = with(R"({"a": 0, "b": 1, "<|endoftext|>": 2})");
  CollectedDiagnostics told;
  validate_arguments(arguments, {}, told.sink());
  EXPECT_EQ(arguments.vocab_size, 3);
  EXPECT_EQ(arguments.padded_vocab_size, 128);
  for (const char* wrong : {"[]", "{}", "{", "\"a\""})
    EXPECT_THAT(refusal(with(wrong)), HasSubstr("is not a JSON object of tokens and their numbers")) << wrong;
  std::filesystem::remove(file);
  EXPECT_THAT(refusal(arguments_from("--tokenizer-type GPT2BPETokenizer")), HasSubstr("needs --vocab-file"));
}

TEST(ValidateArguments, HuggingFaceModelsBringTheirSizes) {
  Arguments arguments;
  arguments.hf_model = "dir";
  arguments.seq_length = 64;
  arguments.micro_batch_size = 1;
  arguments.train_iters = 1;
  arguments.lr = 1e-3;
  arguments.mock_data = true;
  CollectedDiagnostics told;
  validate_arguments(arguments, {}, told.sink());
  EXPECT_FALSE(arguments.padded_vocab_size.has_value()) << "their vocabulary is never padded";
  EXPECT_FALSE(arguments.hidden_size.has_value());
}

TEST(ValidateArguments, AsksForThePartsOfTheRunOnly) {
  Arguments arguments = arguments_from("--sequence-parallel --tensor-model-parallel-size 2 --seq-length 15");
  arguments.lr.reset();
  arguments.train_iters.reset();
  arguments.data_path.clear();
  arguments.mock_data = false;
  arguments.micro_batch_size.reset();
  CollectedDiagnostics told;
  const auto check = [&](Arguments with, const RunParts& parts) {
    validate_arguments(with, {.world_size = 2}, told.sink(), {}, parts);
    return with;
  };
  const auto inference = check(arguments, {.training = false, .schedule = false});
  EXPECT_EQ(inference.micro_batch_size, 1);
  EXPECT_FALSE(inference.sequence_parallel) << "prompts are of any length";
  EXPECT_FALSE(inference.lr || inference.train_iters || inference.split);
  arguments.seq_length = 16;
  arguments.micro_batch_size = 4;
  const auto plan = check(arguments, {.schedule = false, .data = false});
  EXPECT_EQ(plan.global_batch_size, 4);
  EXPECT_TRUE(plan.sequence_parallel);
  EXPECT_FALSE(plan.lr || plan.train_iters);
}

TEST(ValidateArguments, NamesWhatIsMissing) {
  const std::pair<const char*, std::function<void(Arguments&)>> rows[] = {
      {"--num-layers is missing", [](auto& a) { a.num_layers.reset(); }},
      {"--hidden-size is missing", [](auto& a) { a.hidden_size.reset(); }},
      {"--num-attention-heads is missing", [](auto& a) { a.num_attention_heads.reset(); }},
      {"--max-position-embeddings is missing", [](auto& a) { a.max_position_embeddings.reset(); }},
      {"--micro-batch-size is missing", [](auto& a) { a.micro_batch_size.reset(); }},
      {"--seq-length is missing", [](auto& a) { a.seq_length.reset(); }},
      {"--lr is missing", [](auto& a) { a.lr.reset(); }},
      {"--vocab-size is missing", [](auto& a) { a.vocab_size.reset(); }},
      {"the length of the training is missing", [](auto& a) { a.train_iters.reset(); }},
      {"there is no data", [](auto& a) { a.mock_data = false; }},
      {"needs --use-torch-fsdp2", [](auto& a) { a.use_torch_fsdp2 = false; }},
  };
  for (const auto& [message, change] : rows) {
    auto arguments = arguments_from("");
    change(arguments);
    EXPECT_THAT(refusal(arguments, {.world_size = 2}), HasSubstr(message));
  }
}

struct Rule {
  const char* flags;
  const char* message;
};

TEST(ValidateArguments, EachRuleSaysBothValuesAndTheReason) {
  const Rule rules[] = {
      // sizes
      {"--from-scratch", "--from-scratch needs --hf-model"},
      {"--model-plugin x.so", "--model-plugin x.so needs --model"},
      {"--model-plugin x.so --model mine --save-hf there", "--save-hf needs --hf-model here"},
      {"--encoder-num-layers 2", "--num-layers and --encoder-num-layers mean the same"},
      {"--encoder-seq-length 2", "--seq-length and --encoder-seq-length mean the same"},
      {"--num-layers 0", "--num-layers is 0; it must be positive"},
      {"--hidden-size 98", "--hidden-size 98 is not divisible by --num-attention-heads 4"},
      {"--position-embedding-type mrope", "belongs to vision-language models"},
      {"--swiglu --squared-relu", "exclude each other"},
      {"--rotary-percent 1.5", "--rotary-percent is 1.5"},
      {"--kv-channels 0", "--kv-channels is 0; it must be positive"},
      {"--ffn-hidden-size -1", "--ffn-hidden-size is -1"},
      {"--norm-epsilon 0", "--norm-epsilon is 0"},
      {"--init-method-std -0.5", "--init-method-std is -0.5; it must be not negative"},
      {"--adam-eps 0", "--adam-eps is 0"},
      {"--use-rope-scaling --rotary-seq-len-interpolation-factor 2", "exclude each other"},
      {"--position-embedding-type rope --kv-channels 3", "an even number of channels a head, got 3"},
      {"--position-embedding-type rope --rotary-percent 0.01", "got 0 of 24"},
      {"--swiglu --hidden-size 16", "which is 0; give it"},
      {"--hidden-dropout 1", "--hidden-dropout is 1.0; it must be from 0 to below 1"},
      {"--group-query-attention --num-query-groups 3",
       "--num-attention-heads 4 is not divisible by --num-query-groups 3"},
      {"--seq-length 65", "--max-position-embeddings 64 is less than --seq-length 65"},
      {"--seq-length 0", "--seq-length is 0"},
      // ranks
      {"--expert-model-parallel-size 4", "is not divisible by --expert-model-parallel-size 4"},
      {"--context-parallel-size 4", "world size 6 is not divisible by --context-parallel-size 4"},
      {"--context-parallel-size 0", "--context-parallel-size is 0; it must be positive"},
      {"--context-parallel-size 3 --cp-comm-type p2p", "--seq-length 64 is not divisible by 6, twice"},
      {"--context-parallel-size 2 --cp-comm-type p2p a2a", "--cp-comm-type p2p a2a differs between layers"},
      {"--context-parallel-size 2 --cp-comm-type a2a --context-parallel-algo megatron_cp_algo",
       "--context-parallel-algo megatron_cp_algo and --cp-comm-type a2a are different ways"},
      {"--context-parallel-size 6 --cp-comm-type a2a+p2p", "hybrid_cp_algo (a2a+p2p) needs --ulysses-degree-in-cp"},
      {"--context-parallel-size 6 --cp-comm-type a2a+p2p --ulysses-degree-in-cp 4",
       "--ulysses-degree-in-cp 4 must divide --context-parallel-size 6"},
      {"--context-parallel-size 6 --cp-comm-type a2a+p2p --ulysses-degree-in-cp 6", "leave a ring of two places"},
      {"--context-parallel-size 6 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
       "--hierarchical-context-parallel-sizes 2 2 must be two numbers"},
      {"--context-parallel-size 6 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 3 "
       "--ulysses-degree-in-cp 3",
       "differ; give one of them"},
      {"--context-parallel-size 6 --hierarchical-context-parallel-sizes 2 3", "add --context-parallel-algo hybrid"},
      {"--distributed-timeout-minutes 0", "--distributed-timeout-minutes is 0"},
      {"--device cuda", "--device cuda needs a GPU"},
      {"--distributed-backend npu:hccl,cpu:gloo", "is for NPUs"},
      {"--distributed-backend mpi", "--distributed-backend mpi is unknown"},
      {"--distributed-backend nccl", "needs GPUs, but this run is on CPUs"},
      // batches
      {"--micro-batch-size 0", "--micro-batch-size is 0"},
      {"--global-batch-size 20",
       "global batch size 20 is not divisible by 12 (micro batch size 2 * data parallel size 6)"},
      {"--global-batch-size 6 --decrease-batch-size-if-needed", "global batch size 6 is not divisible by 12"},
      {"--rampup-batch-size 12 12 100", "--rampup-batch-size does not go with --train-iters"},
      // length and learning rate
      {"--train-samples 10", "--train-iters and --train-samples exclude each other"},
      {"--lr-decay-samples 5", "--lr-decay-samples does not go with --train-iters"},
      {"--lr-warmup-samples 5", "--lr-warmup-samples does not go with --train-iters"},
      {"--lr-wsd-decay-samples 5", "--lr-wsd-decay-samples does not go with --train-iters"},
      {"--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "--lr-warmup-fraction excludes"},
      {"--lr-warmup-fraction 1", "--lr-warmup-fraction is 1.0"},
      {"--min-lr 0.1", "--min-lr 0.1 is above --lr 0.001"},
      {"--lr-warmup-init 0.1", "--lr-warmup-init 0.1 is above --lr 0.001"},
      {"--lr -1", "--lr is -1.0"},
      {"--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"},
      {"--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler", "exclude each other"},
      // optimizer
      {"--clip-grad -1", "--clip-grad is -1.0"},
      {"--adam-beta2 1", "--adam-beta2 is 1.0"},
      {"--start-weight-decay 0.1", "need --weight-decay-incr-style linear or cosine"},
      {"--weight-decay-incr-style linear", "needs --start-weight-decay and --end-weight-decay"},
      {"--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1", "goes from 0.2 to 0.1"},
      {"--log-interval 0", "--log-interval is 0"},
      {"--eval-iters -1", "--eval-iters is -1"},
      {"--empty-unused-memory-level 3", "it must be from 0 to 2"},
      {"--peak-tflops 0", "--peak-tflops is 0.0"},
      // FSDP2
      {"--use-torch-fsdp2 false", "world size is 6, which needs --use-torch-fsdp2"},
      {"--use-torch-fsdp2 false --fsdp2-config-path f.yaml", "--fsdp2-config-path f.yaml needs --use-torch-fsdp2"},
      {"--fsdp2-config-strict", "needs --fsdp2-config-path"},
      // checkpoints
      {"--save out", "--save out needs --save-interval"},
      {"--save-interval 2", "--save-interval 2 needs --save"},
      {"--save out --save-interval 0", "--save-interval is 0"},
      {"--save out --save-interval 0 --save-retain-interval 2", "--save-interval is 0"},
      {"--ckpt-convert-format torch_dcp", "--ckpt-convert-format needs --load"},
      {"--ckpt-convert-save out", "--ckpt-convert-save needs --ckpt-convert-format"},
      {"--ckpt-step 5", "--ckpt-step 5 needs --load"},
      {"--most-recent-k 0", "--most-recent-k is 0; it must be positive"},
      {"--save-retain-interval 0", "--save-retain-interval is 0"},
      {"--save out --save-interval 5 --save-retain-interval 12", "no multiple of --save-interval 5"},
      {"--finetune", "--finetune needs"},
      {"--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint needs --load"},
      // data
      {"--data-path a", "exclude each other; give one source"},
      {"--mock-data false --data-path a --data-args-path f", "--data-path and --data-args-path exclude each other"},
      {"--mock-data false --train-data-path a --split 9,1,0", "--split 9,1,0 does not go with"},
      {"--num-workers -1", "--num-workers is -1"},
      {"--vocab-size 0", "--vocab-size is 0"},
      {"--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by is 0"},
  };
  for (const auto& [flags, message] : rules) {
    EXPECT_THAT(refusal(arguments_from(flags), {.world_size = 6}), HasSubstr(message)) << flags;
  }
}

TEST(ValidateArguments, TellsAllBrokenRulesAtOnce) {
  auto arguments = arguments_from("--hidden-size 98 --device cuda --clip-grad -1 --save out --global-batch-size 3 "
                                  "--context-parallel-size 4 --min-lr 1");
  arguments.seq_length.reset();
  EXPECT_EQ(refusal(arguments, {.world_size = 2}),
            "8 things must change:\n"
            "  --clip-grad is -1.0; it must be not negative.\n"
            "  --device cuda needs a GPU, and this machine has none that can be used; leave it out "
            "or use --device cpu.\n"
            "  --hidden-size 98 is not divisible by --num-attention-heads 4; change one, or give "
            "the head size by --kv-channels.\n"
            "  --min-lr 1.0 is above --lr 0.001; it is where the decay ends.\n"
            "  --save out needs --save-interval, the steps between checkpoints.\n"
            "  --seq-length is missing; give the tokens of a sequence.\n"
            "  global batch size 3 is not divisible by 2 (micro batch size 2 * data parallel size "
            "1); change --global-batch-size, --micro-batch-size or the number of ranks.\n"
            "  world size 2 is not divisible by --context-parallel-size 4; change one of them.");
}

TEST(ValidateArguments, EvaluatingNeedsNothingOfTraining) {
  auto arguments = arguments_from("--skip-train");
  arguments.train_iters.reset();
  arguments.micro_batch_size.reset();
  arguments.lr.reset();
  CollectedDiagnostics told;
  validate_arguments(arguments, {.world_size = 2}, told.sink());
  EXPECT_EQ(arguments.global_batch_size, 2);
}

TEST(ValidateArguments, SampleModeBansSteps) {
  for (const auto& [flags, message] : {Rule{"--lr-decay-iters 5", "--lr-decay-iters does not go with --train-samples"},
                                       Rule{"--lr-warmup-iters 5", "--lr-warmup-iters does not go with"},
                                       Rule{"--lr-wsd-decay-iters 5", "--lr-wsd-decay-iters does not go with"},
                                       Rule{"--train-samples 1", "less than one global batch of 2"}}) {
    auto arguments = arguments_from(std::string("--train-samples 100 ") + flags);
    arguments.train_iters.reset();
    EXPECT_THAT(refusal(arguments), HasSubstr(message)) << flags;
  }
  auto arguments = arguments_from("--train-samples 101");
  arguments.train_iters.reset();
  CollectedDiagnostics told;
  validate_arguments(arguments, {}, told.sink());
  EXPECT_EQ(arguments.train_iters, 50);
}

TEST(ValidateArguments, OneConnectionMattersOnGpusOnly) {
  EXPECT_THAT(refusal(arguments_from(""), {.has_gpu = true, .cuda_device_max_connections = "1"}),
              HasSubstr("CUDA_DEVICE_MAX_CONNECTIONS is 1"));
  validated("", {.has_gpu = true, .cuda_device_max_connections = "8"});
  validated("", {.has_gpu = false, .cuda_device_max_connections = "1"});
}

TEST(ValidateArguments, DeterminismOnGpusNeedsAnAlgorithm) {
  EXPECT_THAT(refusal(arguments_from("--deterministic-mode"), {.world_size = 2, .has_gpu = true}),
              HasSubstr("but it is not set"));
  validated("--deterministic-mode", {.world_size = 2, .has_gpu = true, .nccl_algo = "Ring"});
  validated("--deterministic-mode", {.has_gpu = true});  // one rank adds nothing
  validated("--deterministic-mode");
}

// Megatron demands these; see docs/arguments.md.
TEST(ValidateArguments, RulesForLimitationsOfOthersAreDropped) {
  const auto tied = validated("", {.world_size = 2});
  EXPECT_FALSE(tied.arguments.untie_embeddings_and_output_weights);
  EXPECT_TRUE(tied.arguments.gradient_accumulation_fusion);
}

TEST(ValidateArguments, ADynamicLossScaleGoesOnWhereThereIsNoNumber) {
  const auto checks = [](const std::string& line) { return validated(line).arguments.check_for_nan_in_loss_and_grad; };
  EXPECT_FALSE(checks("--fp16"));
  EXPECT_FALSE(checks("--fp16 --loss-scale 0"));
  EXPECT_TRUE(checks("--fp16 --loss-scale 128"));
  EXPECT_TRUE(checks(""));
  EXPECT_THAT(validated("--fp16").told.text(), HasSubstr("skips the step and lowers the scale, as in Megatron"));
  EXPECT_THAT(validated("--hysteresis 3").told.text(),
              HasSubstr("--hysteresis has no effect: it is of a dynamic loss scale, and only fp16 has one."));
  EXPECT_THAT(validated("--fp16 --loss-scale 4 --min-loss-scale 2").told.text(),
              HasSubstr("--min-loss-scale has no effect: it is of a dynamic loss scale, and --loss-scale gives a"));
  EXPECT_EQ(validated("--fp16 --hysteresis 3").told.text().find("no effect"), std::string::npos);
}

TEST(ValidateArguments, TellsWhatAUserShouldKnow) {
  EXPECT_THAT(validated("--bf16").told.text(), HasSubstr("set param_dtype: bf16 in the FSDP2 file"));
  EXPECT_EQ(validated("--bf16").arguments.params_dtype, "bf16");
  EXPECT_THAT(validated("--fp16").told.text(), HasSubstr("set param_dtype: fp16 in the FSDP2 file"));
  EXPECT_EQ(validated("--fp16").arguments.params_dtype, "fp16");
  EXPECT_THAT(validated("--sequence-parallel").told.text(),
              HasSubstr("--sequence-parallel has no effect: it needs --tensor-model-parallel-size above 1"));
  EXPECT_FALSE(validated("--sequence-parallel").arguments.sequence_parallel);
  EXPECT_THAT(validated("--use-flash-attn --manual-gc").told.text(),
              HasSubstr("Accepted without effect: --manual-gc (there is no Python garbage collector here); "
                        "--use-flash-attn (the attention kernel follows from device and dtype)."));
  EXPECT_THAT(validated("--mock-data false --data-path a").told.text(), HasSubstr("the data is split 969, 30, 1"));
}

TEST(PaddedVocabSize, IsTheNextMultiple) {
  EXPECT_EQ(padded_vocab_size(50257, 128, 1), 50304);
  EXPECT_EQ(padded_vocab_size(50257, 128, 8), 51200);
  EXPECT_EQ(padded_vocab_size(128, 128, 1), 128);
  EXPECT_EQ(padded_vocab_size(7, 1, 1), 7);
}

TEST(ValidateArguments, RecomputeAndOffloadFlagsMakeAPlan) {
  const auto plan = [](const std::string& flags) { return activation_plan(validated(flags).arguments); };
  const std::string full = "--recompute-granularity full --recompute-num-layers 1 ";
  EXPECT_THAT(plan("").recompute, IsEmpty());
  EXPECT_THAT(plan("").offload, IsEmpty());
  EXPECT_THAT(plan("--recompute-activations").recompute, ElementsAre("core_attn"));
  EXPECT_THAT(plan("--recompute-granularity selective --recompute-modules mlp core_attn").recompute,
              ElementsAre("mlp", "core_attn"));
  EXPECT_THAT(plan(full + "--recompute-method uniform").recompute, ElementsAre("layer"));
  EXPECT_FALSE(plan(full + "--recompute-method uniform").recompute_layers.has_value());
  EXPECT_EQ(plan(full + "--recompute-method block").recompute_layers, 1);
  EXPECT_EQ(plan("--cpu-offloading-num-layers 1").offload_layers, 1);
  const auto fine = plan("--fine-grained-activation-offloading --offload-modules core_attn attn_proj "
                         "--min-offloaded-tensor-size 7");
  EXPECT_THAT(fine.offload, ElementsAre("core_attn", "attn_proj"));
  EXPECT_EQ(fine.min_offloaded_elements, 7);
}

TEST(ValidateArguments, RecomputeAndOffloadFlagsThatDoNotGoTogether) {
  const std::pair<const char*, const char*> wrong[] = {
      {"--recompute-activations --recompute-granularity full", "but that is full"},
      {"--recompute-granularity full --recompute-num-layers 1", "needs --recompute-method"},
      {"--recompute-granularity full --recompute-method block", "needs --recompute-num-layers"},
      {"--recompute-granularity full --recompute-method block --recompute-num-layers 3", "from 1 to the 2 layers"},
      {"--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
       "layers are recomputed one by one"},
      {"--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
       "--recompute-modules mlp",
       "belongs to --recompute-granularity selective"},
      {"--recompute-activations --recompute-method block", "does not go with"},
      {"--recompute-activations --recompute-num-layers 1", "does not go with"},
      {"--recompute-method block", "need --recompute-granularity"},
      {"--cpu-offloading-num-layers 2", "less than the 2 layers"},
      {"--cpu-offloading-num-layers 1 --recompute-activations", "does not go with recompute"},
      {"--cpu-offloading-num-layers 1 --fine-grained-activation-offloading --offload-modules "
       "mlp_norm",
       "exclude each other"},
      {"--fine-grained-activation-offloading", "needs --offload-modules"},
      {"--offload-modules mlp_norm", "needs --fine-grained-activation-offloading"},
      {"--fine-grained-activation-offloading --offload-modules attn_proj", "needs core_attn too"},
  };
  for (const auto& [flags, part] : wrong) EXPECT_THAT(usage_error([&] { validated(flags); }), HasSubstr(part)) << flags;
}

}  // namespace
}  // namespace megashard
