#include "launch/mindspeed/preparation.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/hugging_face/safetensors.h"
#include "framework/data/conversation_dataset.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;

class PreparationTest : public testing::Test {
 protected:
  PreparationTest() : folder_(fs::temp_directory_path() / ("prepared_" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
    std::ofstream(folder_ / "chats.json") << "[]";
    asked_.place = "data.json: dataset_param";
    asked_.inputs = {(folder_ / "chats.json").string()};
    asked_.model = "models/a model";
    asked_.turn_template = "qwen2vl";
    asked_.cutoff_length = 64;
  }
  ~PreparationTest() override { fs::remove_all(folder_); }

  /// The files that the script writes, as far as the check reads them.
  void write_set(const std::string& flags, const std::string& inputs, int64_t images = 1) const {
    SafetensorsWriter writer(asked_.prefix() + kConversationsSuffix, {{"image_grid_thw", at::kLong, {images, 3}}},
                             {{"flags", flags}, {"inputs", inputs}});
    writer.write(at::zeros({images, 3}, at::kLong));
    writer.finish();
  }

  std::string flags() const {
    std::string text;
    for (const auto& [flag, words] : asked_.flags())
      text += (text.empty() ? "{\"" : ", \"") + flag + "\": \"" + words + "\"";
    return text + "}";
  }

  std::string message() const {
    return usage_error([this] { require_prepared(asked_); });
  }

  fs::path folder_;
  Preparation asked_;
};

TEST_F(PreparationTest, IsACommandOfAShell) {
  EXPECT_THAT(asked_.command(), StartsWith("python launch/preprocess/preprocess_data.py --input-format conversations "
                                           "--input " +
                                           asked_.inputs.front() + " --tokenizer-model 'models/a model' "));
  EXPECT_THAT(asked_.command(),
              HasSubstr(" --columns assistant=gpt audios= content=value images= messages=conversations "));
  EXPECT_THAT(asked_.command(), testing::EndsWith(" --image-min-pixels 1024 --cutoff-length 64"));
  asked_.cache_folder = (folder_ / "cache").string();
  asked_.mask_history = asked_.fix_mistral_regex = true;
  asked_.workers = 4;
  EXPECT_THAT(asked_.command(), StartsWith("mkdir -p " + asked_.cache_folder + " && python "));
  EXPECT_THAT(asked_.command(), testing::EndsWith(" --mask-history --fix-mistral-regex --workers 4"));
  EXPECT_EQ(asked_.prefix(), (folder_ / "cache" / "chats").string());
}

TEST_F(PreparationTest, IsAskedForWithItsCommand) {
  EXPECT_THAT(message(),
              HasSubstr("is not prepared (there is no " + (folder_ / "chats").string() + kConversationsSuffix));
  EXPECT_THAT(message(), HasSubstr("; run `" + asked_.command() + "`."));
  asked_.inputs = {"none.json"};
  EXPECT_EQ(message(), "data.json: dataset_param: there is no file none.json; correct basic_parameters.dataset.");
}

TEST_F(PreparationTest, OfOtherFlagsOrDataIsRefused) {
  write_set(flags(), R"({"chats.json": "2"})");
  EXPECT_NO_THROW(require_prepared(asked_));
  std::ofstream(folder_ / "chats.json") << "[ ]";
  EXPECT_THAT(message(), HasSubstr("was prepared of other data than"));
  std::ofstream(folder_ / "chats.json") << "[]";
  asked_.cutoff_length = 65;
  EXPECT_THAT(message(), HasSubstr("was prepared with --cutoff-length 64 instead of 65; run `"));
  asked_.cutoff_length = 64;
  asked_.max_samples = 3;
  EXPECT_THAT(message(), HasSubstr("was prepared without --max-samples 3; run `"));
  write_set(flags(), R"({"chats.json": "2"})");
  asked_.max_samples.reset();
  EXPECT_THAT(message(), HasSubstr("was prepared with --max-samples 3; run `"));
  write_set("no object", R"({"chats.json": "2"})");
  EXPECT_THAT(message(), HasSubstr("was prepared without --template qwen2vl, without --columns"));
}

TEST_F(PreparationTest, PicturesOfOtherLimitsAreRefused) {
  const auto prefix = asked_.prefix();
  const auto refusal = [&](int64_t most) {
    return usage_error([&] { require_pictures_prepared(prefix, {{"--image-max-pixels", most}}, "actor.model_args"); });
  };
  EXPECT_NO_THROW(require_pictures_prepared(prefix, {{"--image-max-pixels", 9}}, "")) << "of documents";
  write_set(R"({"--image-max-pixels": "100"})", "{}");
  EXPECT_NO_THROW(require_pictures_prepared(prefix, {{"--image-max-pixels", 100}}, ""));
  EXPECT_THAT(refusal(99), HasSubstr("actor.model_args asks for --image-max-pixels 99, but "));
  EXPECT_THAT(refusal(99), HasSubstr("was prepared with 100; prepare it again"));
  write_set("{}", "{}");
  EXPECT_THAT(refusal(99), HasSubstr("was prepared without it; prepare it again"));
  write_set("{}", "{}", 0);
  EXPECT_NO_THROW(require_pictures_prepared(prefix, {{"--image-max-pixels", 9}}, "")) << "no pictures";
}

}  // namespace
}  // namespace megashard
