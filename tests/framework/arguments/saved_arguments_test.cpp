#include "framework/arguments/saved_arguments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/files/file_io.h"
#include "parallel/sharded_tensor.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;

Arguments sized(int64_t layers) {
  Arguments arguments;
  arguments.num_layers = layers;
  arguments.hidden_size = 8;
  arguments.padded_vocab_size = 128;
  return arguments;
}

TEST(ArgumentRecord, ComesBackFromADict) {
  Arguments arguments = sized(2);
  arguments.rampup_batch_size = {2, 2, 20};
  arguments.data_path = {"0.5", "a"};
  const auto record = argument_values(arguments);
  EXPECT_EQ(to_record(to_dict(record)), record);
  Dict foreign;
  foreign.set("params_dtype", at::kBFloat16);
  foreign.set("num_layers", 3);
  EXPECT_EQ(find_known(to_record(foreign), "params_dtype"), nullptr);
  EXPECT_EQ(*find_known(to_record(foreign), "num_layers"), ArgumentValue(int64_t{3}));
}

TEST(CheckpointArguments, OfAnotherNetworkAreRefusedWithBothValues) {
  const auto saved = argument_values(sized(2));
  check_checkpoint_arguments(sized(2), saved, "F");
  EXPECT_THAT(usage_error([&] { check_checkpoint_arguments(sized(3), saved, "F"); }),
              HasSubstr("the checkpoint F has num_layers 2, and this run has 3: give --num-layers "
                        "2, or --use-checkpoint-args."));
  Arguments other = sized(2);
  other.swiglu = true;
  EXPECT_THAT(usage_error([&] { check_checkpoint_arguments(other, saved, "F"); }),
              HasSubstr("has swiglu False, and this run has True: give the flags of the run"));
  other = sized(2);
  other.padded_vocab_size = 256;
  EXPECT_THAT(usage_error([&] { check_checkpoint_arguments(other, saved, "F"); }), HasSubstr("padded_vocab_size 128"));
  other = sized(3);
  other.openai_gelu = true;
  EXPECT_THAT(usage_error([&] { check_checkpoint_arguments(other, saved, "F"); }),
              AllOf(HasSubstr("2 things must change"), HasSubstr("num_layers 2"), HasSubstr("openai_gelu False")));
  other = sized(3);
  other.hf_model = "M";
  EXPECT_THAT(usage_error([&] { check_checkpoint_arguments(other, saved, "F"); }),
              HasSubstr("another model than --hf-model M"));
  other = sized(2);
  other.num_query_groups = 2;  // without group_query_attention
  other.rotary_base = 500000;
  other.add_position_embedding = false;  // as position_embedding_type says, too
  check_checkpoint_arguments(other, saved, "F");
  check_checkpoint_arguments(other, {}, "F");  // a checkpoint without args
}

TEST(CheckpointArguments, ThatChangedAreListed) {
  const auto saved = argument_values(sized(2));
  Arguments other = sized(2);
  EXPECT_EQ(changed_arguments(other, saved, /*takes_schedule=*/false), "");
  other.seed = 1;
  other.global_batch_size = 8;  // not said by the checkpoint
  other.rotary_base = 500000;
  other.save = "S";
  other.num_workers = 9;
  other.weight_decay = 0.5;
  EXPECT_EQ(changed_arguments(other, saved, /*takes_schedule=*/false),
            "seed 1234 -> 1, rotary_base 10000 -> 500000, weight_decay 0.01 -> 0.5");
  EXPECT_EQ(changed_arguments(other, saved, /*takes_schedule=*/true), "seed 1234 -> 1, rotary_base 10000 -> 500000");
}

// --use-checkpoint-opt_param-scheduler restores what Megatron's scheduler saves; of the rest the flags count.
TEST(CheckpointArguments, ThatTheSchedulersStateLacksAreListedWithIt) {
  const auto saved = argument_values(sized(2));
  Arguments other = sized(2);
  other.lr = other.min_lr = 0.5;
  other.lr_decay_style = LrDecayStyle::kCosine;
  other.lr_warmup_iters = other.lr_warmup_samples = 1;
  other.weight_decay_incr_style = WeightDecayStyle::kLinear;
  EXPECT_EQ(changed_arguments(other, saved, /*takes_schedule=*/true), "");
  other.lr_wsd_decay_style = WsdDecayStyle::kCosine;
  other.lr_warmup_init = 0.125;
  EXPECT_EQ(changed_arguments(other, saved, /*takes_schedule=*/true),
            "lr_wsd_decay_style exponential -> cosine, lr_warmup_init 0.0 -> 0.125");
}

// No weight of the network depends on them: after an out-of-memory a run goes on with tiles.
TEST(CheckpointArguments, OfMemoryAndAdaptersMayChange) {
  const auto saved = argument_values(sized(2));
  Arguments other = sized(2);
  other.apply_tiled_mlp = true;
  other.tiled_num_shards = 8;
  other.lora_dropout = 0.5;
  check_checkpoint_arguments(other, saved, "F");
  EXPECT_EQ(changed_arguments(other, saved, /*takes_schedule=*/false),
            "apply_tiled_mlp False -> True, tiled_num_shards 4 -> 8, lora_dropout 0.0 -> 0.5");
}

TEST(CheckpointArguments, AreTakenWhereNoFlagIsGiven) {
  TemporaryFolder folder;
  Arguments run;
  EXPECT_THAT(usage_error([&] { take_checkpoint_arguments(run, {}); }), HasSubstr("needs --load"));
  run.load = folder.path();
  CollectedDiagnostics said;
  take_checkpoint_arguments(run, said.sink());
  EXPECT_THAT(said.text(), HasSubstr("holds no checkpoint yet, so the flags count"));
  Arguments written = sized(2);
  written.swiglu = true;
  written.hidden_dropout = 0;
  written.lr = 0.5;
  Dict values;
  values.set("args", make_namespace(to_dict(argument_values(written))));
  save_checkpoint(folder.path(), 1, {}, values, nullptr);
  run.hidden_dropout = 0.25;
  run.given = {{"hidden_dropout", "command line"}};
  take_checkpoint_arguments(run, said.sink());
  EXPECT_EQ(run.num_layers, 2);
  EXPECT_TRUE(run.swiglu);
  EXPECT_EQ(run.hidden_dropout, 0.25);
  EXPECT_FALSE(run.lr.has_value());
  EXPECT_THAT(said.text(), HasSubstr("num_layers 2, hidden_size 8"));
  // A changed byte of the args: those of the step before, like everything else of it.
  written.num_layers = 3;
  Dict newer;
  newer.set("args", make_namespace(to_dict(argument_values(written))));
  save_checkpoint(folder.path(), 2, {}, newer, nullptr);
  run.given = {};
  take_checkpoint_arguments(run, said.sink());
  EXPECT_EQ(run.num_layers, 3);
  const auto file = folder.file("iter_0000002/__0_0.distcp");
  auto bytes = read_small_file(file, 1 << 20);
  bytes[bytes.find("hidden_size")] ^= 1;
  std::ofstream(file) << bytes;
  take_checkpoint_arguments(run, said.sink());
  EXPECT_EQ(run.num_layers, 2);
  run.hf_model = "M";
  EXPECT_THAT(usage_error([&] { take_checkpoint_arguments(run, {}); }), HasSubstr("leave one out"));
}

}  // namespace
}  // namespace megashard
