#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "framework/arguments/argument_help.h"
#include "framework/arguments/argument_table.h"
#include "framework/arguments/nearest_name.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

void set(Arguments& arguments, const std::string& flag, const std::vector<std::string>& words = {}) {
  const Option* option = find_option(flag);
  ASSERT_NE(option, nullptr) << flag;
  set_option(*option, words, arguments);
}

std::string refusal(const std::string& flag, const std::vector<std::string>& words) {
  Arguments arguments;
  return usage_error([&] { set(arguments, flag, words); });
}

TEST(ArgumentTable, EachSpellingAndNameStandsOnce) {
  std::set<std::string> spellings, names;
  for (const auto& option : option_table()) {
    EXPECT_TRUE(names.insert(option.name).second) << option.name;
    if (option.status == OptionStatus::kComputed) continue;
    EXPECT_TRUE(option.flag.starts_with("--")) << option.flag;
    EXPECT_EQ(find_option(option.flag), &option) << option.flag;
    const bool says_something = !(option.status == OptionStatus::kUsed ? option.help : option.reason).empty();
    EXPECT_TRUE(says_something) << option.flag;
    EXPECT_TRUE(spellings.insert(option.flag).second) << option.flag;
    for (const auto& other : option.aliases) EXPECT_TRUE(spellings.insert(other).second) << other;
  }
}

TEST(ArgumentTable, StoresEachKindOfValue) {
  Arguments arguments;
  set(arguments, "--num-layers", {"12"});
  set(arguments, "--lr", {"1e-4"});
  set(arguments, "--seed", {"7"});
  set(arguments, "--adam_eps", {"1E-6"});
  set(arguments, "--save", {"out"});
  set(arguments, "--save-hf", {"hf"});
  set(arguments, "--lr-decay-style", {"WSD"});
  set(arguments, "--swiglu");
  set(arguments, "--disable-bias-linear");
  set(arguments, "--rampup-batch-size", {"16", "8", "1000"});
  set(arguments, "--data-path", {"0.5", "a", "0.5", "b"});
  set(arguments, "--persistent-save-interval", {"5"});
  EXPECT_EQ(arguments.num_layers, 12);
  EXPECT_EQ(arguments.lr, 1e-4);
  EXPECT_EQ(arguments.seed, 7);
  EXPECT_EQ(arguments.adam_eps, 1e-6);
  EXPECT_EQ(arguments.save, "out");
  EXPECT_EQ(arguments.save_hf, "hf");
  EXPECT_EQ(arguments.lr_decay_style, LrDecayStyle::kWsd);
  EXPECT_TRUE(arguments.swiglu);
  EXPECT_FALSE(arguments.add_bias_linear);
  EXPECT_THAT(arguments.rampup_batch_size, ElementsAre(16, 8, 1000));
  EXPECT_THAT(arguments.data_path, ElementsAre("0.5", "a", "0.5", "b"));
  EXPECT_EQ(arguments.save_interval, 5);
  EXPECT_TRUE(arguments.is_given("add_bias_linear"));
  EXPECT_FALSE(arguments.is_given("hidden_size"));
}

TEST(ArgumentTable, SwitchesCanBeSpeltOut) {
  Arguments arguments;
  set(arguments, "--disable-bias-linear", {"false"});
  set(arguments, "--swiglu", {"false"});
  EXPECT_TRUE(arguments.add_bias_linear);
  EXPECT_FALSE(arguments.swiglu);
  set(arguments, "--swiglu", {"true"});
  EXPECT_TRUE(arguments.swiglu);
}

TEST(ArgumentTable, WrongValuesAreErrors) {
  EXPECT_EQ(refusal("--lr", {"fast"}), "--lr takes a number, got \"fast\".");
  EXPECT_EQ(refusal("--num-layers", {"2.5"}), "--num-layers takes a whole number, got \"2.5\".");
  EXPECT_THAT(refusal("--seed", {"99999999999999999999"}), HasSubstr("within range"));
  EXPECT_EQ(refusal("--lr", {}), "--lr has no value; write --lr FLOAT.");
  EXPECT_EQ(refusal("--lr", {"1", "2"}), "--lr takes one value, got 2.");
  EXPECT_EQ(refusal("--save", {""}), "--save has an empty value; is a variable of the script unset? Write --save DIR.");
  EXPECT_EQ(refusal("--rampup-batch-size", {"1", "2"}), "--rampup-batch-size takes 3 values, got 2.");
  EXPECT_EQ(refusal("--data-path", {}), "--data-path has no value; write --data-path [WEIGHT] PREFIX ....");
  EXPECT_EQ(refusal("--lr-decay-style", {"cosin"}),
            "--lr-decay-style takes one of constant, linear, cosine, inverse-square-root, WSD, got "
            "\"cosin\"; did you "
            "mean cosine?");
  EXPECT_THAT(refusal("--swiglu", {"maybe"}), HasSubstr("no value"));
}

TEST(ArgumentTable, RefusesWithTheReason) {
  EXPECT_THAT(refusal("--optimizer", {"dist_muon"}), HasSubstr("--optimizer dist_muon is refused: muon shards"));
  EXPECT_THAT(refusal("--recompute-modules", {"mlp", "moe_act"}),
              HasSubstr("--recompute-modules moe_act is refused: experts are recomputed whole"));
  EXPECT_THAT(refusal("--pipeline-model-parallel-size", {"2"}), HasSubstr("is refused: pipeline"));
  EXPECT_THAT(refusal("--grad-reduce-in-bf16", {}),
              HasSubstr("--grad-reduce-in-bf16 is refused: with FSDP2 gradients are reduced in"));
  EXPECT_THAT(refusal("--recompute-norm", {}), HasSubstr("recompute_modules"));
  EXPECT_THAT(refusal("--batch-size", {"3"}), HasSubstr("use --micro-batch-size"));
  Arguments arguments;
  set(arguments, "--num-distributed-optimizer-instances", {"1"});
  set(arguments, "--pipeline-model-parallel-size", {"1"});
  set(arguments, "--data-parallel-sharding-strategy", {"no_shard"});
  set(arguments, "--grad-reduce-in-bf16", {"false"});
}

TEST(ArgumentTable, KeepsCountOfFlagsWithoutEffect) {
  Arguments arguments;
  set(arguments, "--use-flash-attn");
  set(arguments, "--log-energy");
  EXPECT_THAT(arguments.given_without_effect, ElementsAre("--log-energy", "--use-flash-attn"));
}

TEST(ArgumentTable, KnowsEveryFlagOfMegatronThatUsersPass) {
  for (const char* flag : {"--override-opt_param-scheduler", "--override-opt-param-scheduler",
                           "--use-checkpoint-opt_param-scheduler", "--use_torch_fsdp2", "--init-model-with-meta-device",
                           "--wandb-project", "--no-masked-softmax-fusion", "--transformer-impl", "--async-save",
                           "--eod-mask-loss", "--mm-model", "--lora-r", "--peak-tflops", "--optimizer-selection"}) {
    EXPECT_NE(find_option(flag), nullptr) << flag;
  }
  EXPECT_EQ(find_option("--num-layer"), nullptr) << "abbreviations are not taken";
}

TEST(ArgumentValues, GoOutAndComeBack) {
  Arguments arguments;
  set(arguments, "--num-layers", {"12"});
  set(arguments, "--data-path", {"a", "b"});
  set(arguments, "--min-lr", {"1e-5"});
  Arguments copy;
  for (const auto& [name, value] : argument_values(arguments))
    EXPECT_TRUE(set_argument_value(name, value, copy)) << name;
  EXPECT_EQ(argument_values(copy), argument_values(arguments));
  EXPECT_EQ(copy.num_layers, 12);
  EXPECT_FALSE(set_argument_value("no_such", int64_t{1}, copy));
  EXPECT_FALSE(set_argument_value("num_layers", std::string("x"), copy));
  EXPECT_TRUE(set_argument_value("lr", int64_t{1}, copy)) << "Python writes 1 for 1.0";
}

TEST(ArgumentText, IsThatOfPython) {
  EXPECT_EQ(argument_text({}), "None");
  EXPECT_EQ(argument_text(true), "True");
  EXPECT_EQ(argument_text(0.1), "0.1");
  EXPECT_EQ(argument_text(1.0), "1.0");
  EXPECT_EQ(argument_text(1e-5), "1e-05");
  EXPECT_EQ(argument_text(0.0001), "0.0001");
  EXPECT_EQ(argument_text(100000.0), "100000.0");
  EXPECT_EQ(argument_text(1e16), "1e+16");
  EXPECT_EQ(argument_text(-2.5), "-2.5");
  EXPECT_EQ(argument_text(0.0), "0.0");
  EXPECT_EQ(argument_text(std::vector<int64_t>{1, 2}), "[1, 2]");
  EXPECT_EQ(argument_text(std::vector<std::string>{"a", "b"}), "['a', 'b']");
}

std::string whole_help() {
  return options_help([](const Option&) { return true; });
}

TEST(OptionsHelp, ShowsGroupsDefaultsAndReasons) {
  const auto help = whole_help();
  EXPECT_THAT(help, HasSubstr("\nlearning rate:\n"));
  EXPECT_THAT(help, HasSubstr("--adam-beta2 FLOAT\n      decay of the second moment; from 0 to below 1 [0.999]"));
  EXPECT_THAT(help, HasSubstr("transformer layers; positive; must match a resumed checkpoint\n"));
  EXPECT_THAT(help, HasSubstr("; in YAML also\n      check_for_nan_in_loss_and_grad: false\n"));
  EXPECT_THAT(help, HasSubstr("--save-interval INT, --persistent-save-interval"));
  EXPECT_THAT(help, HasSubstr("--optimizer adam|sgd|muon\n"));
  EXPECT_THAT(help, Not(HasSubstr("consumed_train_samples")));
  EXPECT_THAT(help, Not(HasSubstr("VALUE")));
}

TEST(OptionsHelp, RefusedFlagsAndValuesStandAtTheEnd) {
  const auto help = whole_help();
  const auto end = help.find("\nknown, but refused:\n");
  ASSERT_NE(end, help.npos);
  EXPECT_LT(help.find("\naccepted, without effect here:\n"), end);
  for (const char* refused : {"--grad-reduce-in-bf16", "--is-hybrid-model", "--pipeline-model-parallel-size",
                              "--optimizer dist_muon", "--ckpt-format zarr", "--dataloader-type external"})
    EXPECT_GT(help.find(std::string("  ") + refused), end) << refused;
}

TEST(OptionsHelp, FitsIntoEightyColumns) {
  std::istringstream lines(whole_help());
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), kHelpWidth) << line;
}

TEST(OptionsHelp, AFlagAndASearchHaveTheirParts) {
  const auto all = [](const Option&) { return true; };
  EXPECT_THAT(flag_help(*find_option("--lr")),
              HasSubstr("\nlearning rate:\n  --lr FLOAT\n      largest learning rate"));
  EXPECT_THAT(flag_help(*find_option("--lr")), Not(HasSubstr("--lr-")));
  EXPECT_THAT(flag_help(*find_option("--grad-reduce-in-bf16")), HasSubstr("known, but refused:\n  --grad-reduce"));
  const auto found = search_help({"FP8"}, all);
  EXPECT_THAT(found, HasSubstr("  --fp8-format "));
  EXPECT_THAT(found, HasSubstr("refused:"));
  EXPECT_THAT(found, Not(HasSubstr("--num-layers")));
  EXPECT_EQ(search_help({"fp8", "zebra"}, all), "");
  EXPECT_TRUE(has_words("--seed", "of weights, dropout and data order", {"data", "seed"}));
  EXPECT_FALSE(has_words("--seed", "of weights, dropout and data order", {"drop"}));  // a part of a word
  EXPECT_FALSE(has_words("--seed", "of weights, dropout and data order", {" order "}));
}

TEST(OptionsHelp, EachValueHasAKind) {
  for (const auto& option : option_table()) {
    const bool shown = option.status == OptionStatus::kUsed && !option.is_switch();
    EXPECT_FALSE(shown && option.metavar.empty() && option.choices.empty()) << option.flag;
  }
}

// A choice that the help shows must work, and so must the default.
TEST(ArgumentTable, ChoicesAreNotRefused) {
  for (const auto& option : option_table()) {
    for (const auto& refused : option.refused_values) {
      for (const auto& choice : option.choices) EXPECT_NE(choice, refused.value) << option.flag;
    }
  }
}

TEST(EditDistance, CountsSlips) {
  EXPECT_EQ(edit_distance("lr", "lr", 0), 0);
  EXPECT_EQ(edit_distance("", "abc", 3), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting", 3), 3);
  EXPECT_EQ(edit_distance("trian", "train", 1), 1) << "a swap of neighbours is one slip";
  EXPECT_EQ(edit_distance("abdc", "abcd", 1), 1) << "also when the row before it has none left";
}

TEST(EditDistance, StopsWhenThereAreTooMany) {
  EXPECT_GT(edit_distance("kitten", "sitting", 2), 2);
  EXPECT_GT(edit_distance("lr", "learning_rate", 10), 10);
  EXPECT_GT(edit_distance("abcdefgh", "stuvwxyz", 3), 3);
}

TEST(NearestName, FindsWhatWasMeant) {
  const std::vector<std::string> known = {"--train-iters", "--train-samples", "--lr", "--min-lr", "--seq-length"};
  EXPECT_EQ(nearest_name("--train-iter", known), "--train-iters");
  EXPECT_EQ(nearest_name("--train_itres", known), "--train-iters");
  EXPECT_EQ(nearest_name("--length", {"--seq-length", "--lr"}), "--seq-length");
  EXPECT_EQ(nearest_name("--LR", known), "--lr");
  EXPECT_EQ(nearest_name("rmsnorm", {"LayerNorm", "RMSNorm"}), "RMSNorm");
  EXPECT_EQ(nearest_name("--colour", known), std::nullopt);
  EXPECT_EQ(nearest_name("x", {}), std::nullopt);
}

TEST(NearestName, IsNeverTheOpposite) {
  const std::vector<std::string> known = {"--no-save-rng", "--log-progress", "--disable-bias-linear",
                                          "--untie-embeddings-and-output-weights"};
  EXPECT_EQ(nearest_name("--save-rng", known), std::nullopt);
  EXPECT_EQ(nearest_name("--no-log-progress", known), std::nullopt);
  EXPECT_EQ(nearest_name("--enable-bias-linear", known), std::nullopt);
  EXPECT_EQ(nearest_name("--tie-embeddings-and-output-weights", known), std::nullopt);
  EXPECT_EQ(nearest_name("--nosave-rng", known), "--no-save-rng");
  EXPECT_EQ(nearest_name("--no-save-rgn", known), "--no-save-rng");
  EXPECT_EQ(nearest_name("--disable-bias-liner", known), "--disable-bias-linear");
  EXPECT_EQ(nearest_name("--no-normalization", {"--normalization"}), std::nullopt);
  EXPECT_EQ(nearest_name("--normalisation", {"--normalization"}), "--normalization");
}

TEST(NearestName, MakesASuggestion) {
  EXPECT_EQ(did_you_mean("param_dtyp", {"param_dtype", "reduce_dtype"}), "; did you mean param_dtype?");
  EXPECT_EQ(did_you_mean("colour", {"param_dtype"}), "");
}

}  // namespace

}  // namespace megashard
