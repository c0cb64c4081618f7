#include "framework/data/latent_dataset.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_tensors.h"
#include "framework/data/build_datasets.h"
#include "framework/latent_columns.h"
#include "tests/checkpoint/files/temporary_folder.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kText = 3;  // tokens of a caption
const LatentPatches kPatches{.channels = 2, .patch = {1, 2, 2}, .text_width = 4};

/// A folder of features; text features are the sample's number, those of the empty prompt -1.
class LatentFolders : public ::testing::Test {
 protected:
  void save(const std::string& name, const Dict& values) {
    std::filesystem::create_directories(folder_.path() + "/features");
    OutputFile file(folder_.path() + "/" + name);
    write_stored_value(file, values);
    file.sync_and_close();
  }

  static Dict features(at::IntArrayRef shape, int64_t number) {
    Dict values;
    values.set("video", tensor_value(at::arange(c10::multiply_integers(shape), at::kFloat).view(shape) + number));
    values.set("prompt_ids", tensor_value(at::full({1, kText, 4}, number, at::kFloat)));
    return values;
  }

  void add(at::IntArrayRef shape, bool says_shape = true) { add(features(shape, samples_), shape, says_shape); }
  void add(const Dict& values, at::IntArrayRef shape, bool says_shape = true) {
    const auto name = "features/" + std::to_string(samples_++) + ".pt";
    save(name, values);
    std::ofstream line(folder_.path() + kLatentsFile, std::ios::app);
    line << R"({"file": ")" << name << '"';
    if (says_shape) line << R"(, "shape": )" << c10::str(shape);
    line << "}\n";
  }
  void add_empty_prompt() {
    Dict values;
    values.set("prompt_ids", tensor_value(at::full({kText, 4}, -1, at::kFloat)));
    save("empty_prompt.pt", values);
  }

  std::shared_ptr<LatentDataset> dataset(std::optional<int64_t> samples, const LatentOptions& options = {kPatches},
                                         int64_t seq_length = 16) {
    const auto set = std::make_shared<LatentSet>(folder_.path());
    return std::make_shared<LatentDataset>(
        set, SplitOptions{.last = set->size(), .seq_length = seq_length, .num_samples = samples}, options);
  }
  static int64_t number_in(const Batch& batch, int64_t row) {
    return batch.at(kTextFeatures)[row][0][0].item().toLong();
  }

  TemporaryFolder folder_;
  int64_t samples_ = 0;
};

TEST_F(LatentFolders, PatchesAreInTheOrderOfTheContract) {
  add({2, 1, 2, 4});
  const Batch batch = dataset(1)->collate({0}, {});
  // Channel, then row and column within a patch; the second patch is two columns to the right.
  const at::Tensor patches = batch.at(kLatents).squeeze(1);
  EXPECT_TRUE(at::equal(patches.select(1, 0), at::tensor({0, 1, 4, 5, 8, 9, 12, 13}, at::kFloat)));
  EXPECT_TRUE(at::equal(patches.select(1, 1), at::tensor({2, 3, 6, 7, 10, 11, 14, 15}, at::kFloat)));
  EXPECT_TRUE(at::equal(batch.at(kPositionIds).squeeze(1), at::tensor({0, 0, 0, 0, 0, 1}, at::kLong).view({3, 2})));
  EXPECT_EQ(batch.at(kTextFeatures).sizes(), (std::vector<int64_t>{1, kText, 4}));
  EXPECT_FALSE(batch.token_mask().defined());
  EXPECT_EQ(batch.at(kLossMask).sum().item().toLong(), 2);
}

TEST_F(LatentFolders, SamplesOfOneShapeComeTogether) {
  for (int i = 0; i < 5; ++i) add({2, 1, 2, 4});
  for (int i = 0; i < 6; ++i) add({2, 2, 2, 2}, /*says_shape=*/false);
  const auto set = dataset(44, {.patches = kPatches, .run = 4});
  std::map<int64_t, int> seen;
  std::set<std::vector<int64_t>> orders;
  for (int64_t run = 0; run < 44; run += 4) {
    const Batch batch = set->collate({run, run + 1, run + 2, run + 3}, {});
    EXPECT_FALSE(batch.token_mask().defined()) << "all have as many patches";
    std::vector<int64_t> numbers;
    for (int64_t row = 0; row < 4; ++row) numbers.push_back(number_in(batch, row));
    const auto is_short = [](int64_t number) { return number < 5; };
    EXPECT_TRUE(std::ranges::all_of(numbers, is_short) || std::ranges::none_of(numbers, is_short));
    for (const int64_t each : numbers) ++seen[each];
    orders.insert(numbers);
  }
  EXPECT_EQ(seen.size(), 11U) << "what fills no run comes in a later epoch";
  for (const auto& [number, times] : seen) EXPECT_NEAR(times, 4, 2);
  EXPECT_EQ(orders.size(), 11U);
}

TEST_F(LatentFolders, ShorterSamplesArePadded) {
  add({2, 1, 2, 4});
  add({2, 3, 2, 2});
  const auto set = dataset(std::nullopt);
  const Batch batch = set->collate({0, 1}, {.length_multiple = 4});
  EXPECT_EQ(batch.length(), 4);
  EXPECT_EQ(batch.token_mask().sum().item().toLong(), 5);
  EXPECT_TRUE(at::equal(batch.token_mask(), batch.at(kLossMask) == 1));
}

TEST_F(LatentFolders, EachDrawHasASeedOfItsOwn) {
  add({2, 1, 2, 2});
  const Batch batch = dataset(64)->collate({0, 1, 2, 63}, {});
  const at::Tensor& seeds = batch.at(kNoiseSeeds);
  std::set<int64_t> different(seeds.const_data_ptr<int64_t>(), seeds.const_data_ptr<int64_t>() + 4);
  EXPECT_EQ(different.size(), 4U);
  EXPECT_TRUE(at::equal(dataset(1000)->collate({2}, {}).at(kNoiseSeeds), seeds.narrow(0, 2, 1)));
}

TEST_F(LatentFolders, SomeCaptionsAreDropped) {
  add({2, 1, 2, 2});
  EXPECT_THAT([&] { dataset(1, {.patches = kPatches, .caption_dropout = 0.25}); },
              ThrowsMessage<c10::Error>(HasSubstr("empty_prompt.pt")));
  add_empty_prompt();
  const auto set = dataset(400, {.patches = kPatches, .caption_dropout = 0.25});
  int dropped = 0;
  for (int64_t i = 0; i < 400; ++i) dropped += number_in(set->collate({i}, {}), 0) == -1 ? 1 : 0;
  EXPECT_NEAR(dropped, 100, 26) << "three standard deviations";
}

TEST_F(LatentFolders, CleanFramesHaveNoLoss) {
  Dict values = features({2, 3, 2, 4}, 0);
  values.set("clean_frames", int64_t{1});
  add(values, {2, 3, 2, 4});
  const Batch batch = dataset(1)->collate({0}, {});
  EXPECT_TRUE(at::equal(batch.at(kCleanPatches), batch.at(kLossMask) == 0));
  EXPECT_THAT(batch.at(kCleanPatches).nonzero().select(1, 1).sizes().vec(), ElementsAre(2));
}

TEST_F(LatentFolders, TwoTextsPicturesAndSoundsAreColumns) {
  Dict values = features({2, 1, 2, 4}, 0);
  const auto both = [](const at::Tensor& one, const at::Tensor& other) {
    return List{{tensor_value(one), tensor_value(other)}};
  };
  values.set("prompt_ids", both(at::ones({1, kText, 4}), at::full({1, 5, 3}, 2)));
  values.set("prompt_mask", both(at::ones({1, kText}, at::kLong), at::zeros({1, 5}, at::kLong)));
  values.set("cond_latents", tensor_value(at::ones({3, 1, 2, 4})));
  values.set("vision_states", tensor_value(at::ones({7, 6})));
  values.set("sound", tensor_value(at::ones({9, 5})));
  values.set("frame_rate", tensor_value(at::full({}, 25.0)));
  add(values, {2, 1, 2, 4});
  const Batch batch = dataset(1)->collate({0}, {});
  EXPECT_EQ(batch.at(kTextFeatures).sizes(), (std::vector<int64_t>{1, kText, 4}));
  EXPECT_EQ(batch.at(kSecondText).sizes(), (std::vector<int64_t>{1, 5, 3}));
  EXPECT_EQ(batch.at(kSecondTextMask).sum().item().toLong(), 0);
  EXPECT_EQ(batch.at(kConditions).sizes(), (std::vector<int64_t>{12, 1, 2}));
  EXPECT_EQ(batch.at(kImageFeatures).sizes(), (std::vector<int64_t>{1, 7, 6}));
  EXPECT_EQ(batch.at(kSounds).sizes(), (std::vector<int64_t>{1, 9, 5}));
  EXPECT_EQ(batch.at(kFrameRates).item().toDouble(), 25);
}

TEST_F(LatentFolders, MistakesAreToldWithTheRemedy) {
  const auto told = [&](auto make, const char* what) {
    EXPECT_THAT(make, ThrowsMessage<std::exception>(HasSubstr(what)));
  };
  told([&] { LatentSet{folder_.path()}; }, "data.jsonl cannot be read; write it with");
  add({2, 1, 2, 4});
  told([&] { dataset(1, {kPatches}, 1); }, "has 2 patches, more than --seq-length 1; raise it");
  told([&] { dataset(1, {{.channels = 16, .patch = {1, 2, 2}}}); }, "write the features with the model's own VAE");
  told([&] { dataset(1, {{.channels = 2, .patch = {1, 4, 4}}}); }, "do not divide");
  Dict values = features({2, 1, 2, 4}, 0);
  values.set("i2v_vae_feature", tensor_value(at::ones({2, 1, 2, 2})));
  add(values, {2, 1, 2, 4});
  told([&] { LatentSet(folder_.path()).read(1); }, "frames, rows and columns must be those of \"video\"");
  values = features({2, 1, 2, 4}, 0);
  values.set("clean_frames", int64_t{2});
  add(values, {2, 1, 2, 4});
  told([&] { LatentSet(folder_.path()).read(2); }, "\"clean_frames\" is 2, and the video has 1 frames of latents");
  add({2, 1, 2, 4});
  std::ofstream(folder_.path() + kLatentsFile, std::ios::app) << R"({"file": "../other.pt", "shape": [2, 1, 2, 4]})";
  told([&] { LatentSet{folder_.path()}; }, "line 5: \"../other.pt\" is outside of the folder");
}

TEST_F(LatentFolders, ModelsOfTokensAndOfLatentsTakeTheirOwnData) {
  add({2, 1, 2, 4});
  const DataOptions tokens{.data_path = {folder_.path()}, .split = "100,0,0", .seq_length = 8, .train_samples = 1};
  EXPECT_THAT([&] { build_datasets(tokens); }, ThrowsMessage<std::exception>(HasSubstr("has latents, and the model")));
  DataOptions latents = tokens;
  latents.latents = {kPatches};
  EXPECT_EQ(build_datasets(latents).train->size(), 1);
  latents.data_path = {folder_.path() + "/nothing"};
  EXPECT_THAT([&] { build_datasets(latents); }, ThrowsMessage<std::exception>(HasSubstr("the model takes latents")));
}

}  // namespace
}  // namespace megashard
