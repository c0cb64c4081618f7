#include "framework/training/start_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "framework/data/build_datasets.h"
#include "tests/framework/data/token_files.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(ArgumentsBanner, ListsAllSorted) {
  Arguments arguments;
  arguments.print_all_arguments = true;
  arguments.num_layers = 12;
  arguments.lr = 1e-5;
  const auto banner = arguments_banner(arguments);
  EXPECT_TRUE(banner.starts_with("------------------------ arguments ------------------------\n"));
  EXPECT_TRUE(banner.ends_with("\n-------------------- end of arguments ---------------------"));
  EXPECT_THAT(banner, HasSubstr("\n  num_layers ...................................... 12\n"));
  EXPECT_THAT(banner, HasSubstr("\n  lr .............................................. 1e-05\n"));
  EXPECT_THAT(banner, HasSubstr("\n  save ............................................ None\n"));
  EXPECT_LT(banner.find("  adam_beta1 "), banner.find("  weight_decay "));
}

TEST(ArgumentsBanner, ListsWhatDiffersFromTheDefaults) {
  Arguments arguments;
  arguments.num_layers = 12;
  const auto banner = arguments_banner(arguments);
  EXPECT_THAT(banner, HasSubstr("--print-all-arguments shows all"));
  EXPECT_THAT(banner, HasSubstr("\n  num_layers ...................................... 12\n"));
  EXPECT_THAT(banner, Not(HasSubstr("adam_beta1")));
}

TEST(StartLines, AreMegatrons) {
  Arguments arguments;
  arguments.world_size = arguments.data_parallel_size = 2;
  EXPECT_EQ(sizes_line(arguments), "using world size: 2, data-parallel size: 2, context-parallel size: 1, "
                                   "tensor-model-parallel size: 1, "
                                   "pipeline-model-parallel size: 1");
  EXPECT_EQ(padded_vocab_line(100, 128), " > padded vocab (size: 100) with 28 dummy tokens (new size: 128)");
  EXPECT_EQ(parameter_count_line(7), " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 7");
  EXPECT_EQ(trainable_parameters_line(12, 123), " > trainable parameters: 12 (9.76%) of 123");
}

TEST(DataLine, SaysHowOftenTheDataIsSeen) {
  DataOptions options;
  options.data_path = {write_documents(fresh_prefix("few"), {10, 20, 10, 40})};
  options.split = "75,25,0";
  options.seq_length = 8;
  options.train_samples = 20;
  options.valid_samples = 1;
  const auto splits = build_datasets(options);
  EXPECT_EQ(data_line("training", splits.train.get(), 20, 8),
            " > training data: 3 documents, 40 tokens; asked for: 20 samples of 8 tokens, 4.00 "
            "epochs");
  EXPECT_THAT(data_line("validation", splits.valid.get(), 1, 8),
              HasSubstr("1 document, 40 tokens; asked for: 1 sample of 8 tokens, 0.20 epochs"));
  EXPECT_EQ(data_line("test", splits.test.get(), 1, 8), " > test data: not read");
}

TEST(DataLine, SumsAndSpansTheMembersOfABlend) {
  DataOptions options;
  const auto prefix = write_documents(fresh_prefix("blended"), {40});
  options.data_path = {"3", prefix, "1", prefix};
  options.split = "1,0,0";
  options.seq_length = 8;
  options.train_samples = 20;
  options.valid_samples = options.test_samples = 0;
  EXPECT_EQ(data_line("training", build_datasets(options).train.get(), 20, 8),
            " > training data: 2 documents, 80 tokens; asked for: 20 samples of 8 tokens, 1.00 "
            "to 3.00 epochs");
}

}  // namespace
}  // namespace megashard
