#include "framework/arguments/nearest_name.h"

#include <gtest/gtest.h>

namespace megashard {
namespace {

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
