#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "launch/arguments/command_line.h"
#include "launch/mindspeed/mindspeed_run.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

class MindSpeedDiffusionFiles : public testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) const {
    const auto path = folder_.path() + "/" + name;
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path) << text;
    return path;
  }

  /// The command line of sections, with their settings applied; `data` and `model` are inside JSON's braces.
  CommandLine applied(const std::string& data, const std::string& model, std::vector<std::string> more = {}) const {
    std::vector<std::string> words{"pretrain", "--mm-data", write("data.json", "{" + data + "}"), "--mm-model",
                                   write("model.json", "{" + model + "}")};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<const char*> argv;
    for (const auto& word : words) argv.push_back(word.c_str());
    CommandLine line = parse_arguments(static_cast<int>(argv.size()), argv.data());
    apply_mindspeed(
        *line.mindspeed, line.arguments, 1, [] { return 0; }, [](Severity, const std::string&) {}, line.mistakes);
    return line;
  }
  std::string refusal(const std::string& data, const std::string& model) const {
    return usage_error([&] { applied(data, model).mistakes.throw_if_any(); });
  }

  TemporaryFolder folder_;
};

constexpr const char* kHigh = R"(
  "load_video_features": false, "task": "i2v",
  "diffusion": {"model_id": "wan_flow_match_scheduler", "num_train_timesteps": 1000, "shift": 5, "sigma_min": 0.0,
                "extra_one_step": true, "max_timestep_boundary": 0.417, "min_timestep_boundary": 0.0},
  "predictor": {"model_id": "wandit", "num_layers": 2, "num_heads": 2, "seperated_timestep": true},
  "text_encoder": {"model_id": "UMT5", "from_pretrained": "wan/text_encoder/"})";

std::string videos(const std::string& file) {
  return R"("dataset_param": {"dataset_type": "t2v", "basic_parameters": {"data_path": ")" + file +
         R"(", "data_storage_mode": "combine"}, "preprocess_parameters": {"num_frames": 49, "max_height": 480,
         "max_width": 832, "train_fps": 24, "cfg": 0.0}, "tokenizer_config": {"from_pretrained": "wan/tokenizer",
         "model_max_length": 512}})";
}

std::string features(const std::string& file, const std::string& folder) {
  return R"("dataset_param": {"dataset_type": "feature", "basic_parameters": {"data_path": ")" + file +
         R"(", "data_folder": ")" + folder + R"("}, "tokenizer_config": [{"from_pretrained": "wan/tokenizer"}]})";
}

TEST_F(MindSpeedDiffusionFiles, NoiseIsThatOfTheScheduler) {
  write("out/data.jsonl", "{}");
  const auto line = applied(features(folder_.path() + "/out/data.jsonl", folder_.path() + "/out/"), kHigh);
  const Arguments& arguments = line.arguments;
  EXPECT_EQ(arguments.objective, "flow-matching");
  EXPECT_EQ(arguments.objective_options.at("--timestep-shift"), 5);
  EXPECT_NEAR(arguments.objective_options.at("--timestep-min"), 875, 0.5) << "level 417 of the table";
  EXPECT_EQ(arguments.objective_options.at("--timestep-max"), 1000);
  EXPECT_EQ(arguments.objective_options.at("--timestep-weighting"), 1) << "bsmntw";
  EXPECT_THAT(arguments.data_path, ElementsAre(folder_.path() + "/out"));
  EXPECT_EQ(arguments.hf_model, "wan/transformer");
  EXPECT_EQ(arguments.eval_iters, 0);
}

TEST_F(MindSpeedDiffusionFiles, NoiseIsThatOfHunyuanVideo) {
  write("out/data.jsonl", "{}");
  write("weights/config.json", "{}");
  const auto data = features(folder_.path() + "/out/data.jsonl", "");
  const auto model = [](const std::string& snr) {
    return R"("task": "t2v", "text_encoder": [{"model_id": "Hunyuan15MLLmModel"}, {"model_id": "Hunyuan15GlyphModel"}],
      "diffusion": {"model_id": "hunyuanvideo_15_diffusion", "shift": 7.0, "reverse": true, "solver": "euler",
                    "snr": ")" +
           snr + R"(", "train_timestep_shift": 5.0, "sp_size": 1}, "predictor": {"model_id": "hunyuanvideo15dit"})";
  };
  const std::vector<std::string> load{"--load", folder_.path() + "/weights"};
  const auto options = applied(data, model("lognorm"), load).arguments.objective_options;
  EXPECT_EQ(options.at("--timestep-shift"), 5);
  EXPECT_EQ(options.at("--timestep-sampling"), 1) << "logit-normal";
  EXPECT_FALSE(options.contains("--timestep-weighting"));
  EXPECT_EQ(applied(data, model("uniform"), load).arguments.objective_options.at("--timestep-sampling"), 0);
  EXPECT_THAT(refusal(data, model("mode")), HasSubstr("timesteps are uniform or logit-normal; write lognorm"));
}

constexpr const char* kLtx2 = R"("model_id": "ltx2", "model_name_or_path": "ltx/ltx-2-19b-dev.safetensors",
  "transformer": {"num_layers": 2}, "text_encoder_path": "gemma")";

std::string precomputed(const std::string& folder, const std::string& more) {
  return R"("dataset_param": {"dataset_type": "ltx2_precomputed", "basic_parameters": {"dataset_dir": ")" + folder +
         R"("}, "ltx2_dataset_custom": {"with_audio": true, "fps": 24.0, )" + more +
         R"("timestep_sampling_params": {"std": 0.5, "max_tokens": 4096}}})";
}

TEST_F(MindSpeedDiffusionFiles, Ltx2TakesItsTrainersFeatures) {
  const auto folder = folder_.path() + "/features";
  fs::create_directories(folder);
  EXPECT_THAT(refusal(precomputed(folder, ""), kLtx2),
              HasSubstr("run `python launch/preprocess/preprocess_ltx2.py --model ltx --input " + folder +
                        " --output " + folder +
                        "_features --latents latents --conditions conditions --sounds audio_latents --fps "
                        "24.0`"));
  write("features_features/data.jsonl", "{}");
  const Arguments arguments = applied(precomputed(folder, ""), kLtx2).arguments;
  EXPECT_EQ(arguments.hf_model, "ltx");
  EXPECT_THAT(arguments.data_path, ElementsAre(folder + "_features"));
  EXPECT_EQ(arguments.objective_options.at("--timestep-sampling"), 1) << "logit-normal";
  EXPECT_EQ(arguments.objective_options.at("--timestep-logit-std"), 0.5);
  EXPECT_EQ(arguments.objective_options.at("--timestep-shift-by"), 2) << "ltx2-length";
  EXPECT_THAT(refusal(precomputed(folder, R"("first_frame_conditioning_p": 0.5, )"), kLtx2),
              HasSubstr("first_frame_conditioning_p is 0.5, but first frames without noise are a matter of the data"));
}

TEST_F(MindSpeedDiffusionFiles, FlagsComeBefore) {
  const auto line = applied(features("/nothing/data.jsonl", ""), kHigh,
                            {"--timestep-min", "10", "--hf-model", "mine", "--data-path", "other"});
  EXPECT_EQ(line.arguments.objective_options.at("--timestep-min"), 10);
  EXPECT_EQ(line.arguments.hf_model, "mine");
  EXPECT_THAT(line.arguments.data_path, ElementsAre("other"));
}

TEST_F(MindSpeedDiffusionFiles, VideosAreEncodedFirst) {
  const auto list = write("clips.txt", "videos,clips.json\n");
  EXPECT_THAT(refusal(videos(list), kHigh),
              HasSubstr("is not encoded (there is no " + folder_.path() +
                        "/clips_features/data.jsonl), and training reads features; run `python "
                        "launch/preprocess/preprocess_latents.py --model wan --task i2v --input " +
                        list + " --output " + folder_.path() +
                        "/clips_features --size 480x832 --num-frames 49 --fps 24.0 --max-text-length 512`"));
  write("clips_features/data.jsonl", "{}");
  EXPECT_THAT(applied(videos(list), kHigh).arguments.data_path, ElementsAre(folder_.path() + "/clips_features"));
}

TEST_F(MindSpeedDiffusionFiles, WeightsOfLoadOrOfTheSection) {
  write("weights/config.json", "{}");
  write("out/data.jsonl", "{}");
  const auto data = features(folder_.path() + "/out/data.jsonl", "");
  const auto line = applied(data, kHigh, {"--load", folder_.path() + "/weights"});
  EXPECT_EQ(line.arguments.hf_model, folder_.path() + "/weights");
  EXPECT_FALSE(line.arguments.load) << "it holds no checkpoint";
  const auto vace = applied(data, R"("predictor": {"model_id": "vace", "from_pretrained": "here"})");
  EXPECT_EQ(vace.arguments.hf_model, "here");
}

TEST_F(MindSpeedDiffusionFiles, MistakesAreToldByPlace) {
  const auto data = features(folder_.path() + "/out/data.jsonl", folder_.path());
  EXPECT_THAT(refusal(data, kHigh), HasSubstr("move data.jsonl there"));
  EXPECT_THAT(refusal(data, R"("predictor": {"model_id": "wandit"}, "diffusion": {"sigma_min": 0.1})"),
              HasSubstr("model.json:1: diffusion.sigma_min is 0.1, but the table of noise levels begins at 1"));
  EXPECT_THAT(refusal(data, R"("predictor": {"model_id": "sparse_dit"})"), HasSubstr("no model that this program has"));
  EXPECT_THAT(refusal(data, R"("predictor": {"model_id": "vace", "num_layer": 3})"), HasSubstr("num_layers?"));
}

TEST(MindSpeedNames, AreThoseOfDiffusers) {
  EXPECT_THAT(diffusers_paths({"predictor.double_blocks.{*}", "transformer.patchify_proj"}),
              ElementsAre("transformer_blocks.{*}", "proj_in"));
  EXPECT_THAT(diffusers_paths({"predictor.blocks.{*}", "predictor.wan_dit.head", "predictor.vace_dit.vace_blocks.{*}",
                               "ae", "text_encoder.encoder", "predictor.head"}),
              ElementsAre("blocks.{*}", "proj_out", "vace_blocks.{*}", "proj_out"));
  EXPECT_THAT(diffusers_layers({"proj_q,ffn.0", "to_k"}), ElementsAre("to_q", "ffn.net.0.proj", "to_k"));
}

}  // namespace
}  // namespace megashard
