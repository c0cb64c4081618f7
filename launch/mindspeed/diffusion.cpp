#include "launch/mindspeed/diffusion.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>

#include "framework/arguments/argument_value.h"
#include "framework/data/latent_set.h"
#include "framework/diagnostics.h"
#include "framework/objectives/denoising.h"
#include "launch/mindspeed/preparation.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

/// The path without a slash at its end.
fs::path folder_of(const std::string& path) {
  const auto normal = fs::path(path).lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

bool is_encoder(const std::string& pattern) {
  return pattern == "ae" || pattern.starts_with("ae.") || pattern == "text_encoder" ||
         pattern.starts_with("text_encoder.");
}

}  // namespace

std::string MindSpeedDiffusion::features() const {
  const auto path = fs::path(data_path).lexically_normal();
  if (is_ltx2) return folder_of(data_path).string() + "_features";
  if (dataset_type == "feature") return path.parent_path().string();
  return (path.parent_path() / (path.stem().string() + "_features")).string();
}

std::string MindSpeedDiffusion::command() const {
  if (is_ltx2)
    return "python launch/preprocess/preprocess_ltx2.py --model " + shell_word(pipeline) + " --input " +
           shell_word(data_path) + " --output " + shell_word(features()) + " --latents " + shell_word(videos) +
           " --conditions " + shell_word(texts) + (has_sounds ? " --sounds " + shell_word(sounds) : "") +
           (most_samples > 0 ? " --max-samples " + std::to_string(most_samples) : "") +
           (frames_per_second > 0 ? " --fps " + argument_text(frames_per_second) : "");
  const auto size = std::to_string(rows) + "x" + std::to_string(columns);
  return "python launch/preprocess/preprocess_latents.py --model " + shell_word(pipeline) +
         (task.empty() ? "" : " --task " + shell_word(task)) + " --input " + shell_word(data_path) + " --output " +
         shell_word(features()) + " --size " + size + " --num-frames " + std::to_string(frames) + " --fps " +
         argument_text(frames_per_second) + " --max-text-length " + std::to_string(text_length);
}

std::string MindSpeedDiffusion::model_folder() const {
  const bool is_second = first_share > 0 && fs::is_directory(fs::path(pipeline) / "transformer_2");
  return (fs::path(pipeline) / (is_second ? "transformer_2" : "transformer")).string();
}

double MindSpeedDiffusion::timestep_at(double share) const { return kTimestepCount * shifted_sigma(1 - share, shift); }

void require_features(const MindSpeedDiffusion& diffusion) {
  const auto list = diffusion.features() + kLatentsFile;
  if (diffusion.dataset_type == "feature") {
    require(fs::path(diffusion.data_path).lexically_normal() == fs::path(list).lexically_normal(),
            diffusion.place + ".basic_parameters.data_path is " + diffusion.data_path +
                "; features are read from a file data.jsonl: rename it.");
    require(diffusion.data_folder.empty() || folder_of(diffusion.data_folder) == folder_of(diffusion.features()),
            diffusion.place + ".basic_parameters.data_folder is " + diffusion.data_folder +
                ", but paths in data.jsonl begin at its own folder here; move data.jsonl there.");
    return;  // its reader reports a missing file
  }
  require(fs::exists(diffusion.data_path),
          diffusion.place + ": there is no " + diffusion.data_path + "; correct its path in basic_parameters.");
  require(fs::is_regular_file(list), diffusion.place + ": " + diffusion.data_path + " is not encoded (there is no " +
                                         list + "), and training reads features; run `" + diffusion.command() + "`.");
}

void find_diffusion_model(const MindSpeedDiffusion& diffusion, Arguments& arguments) {
  if (!diffusion.weights.empty()) {
    const auto inner = fs::path(diffusion.weights) / "transformer";
    arguments.hf_model = fs::is_directory(inner) ? inner.string() : diffusion.weights;
  } else if (arguments.load && fs::exists(fs::path(*arguments.load) / "config.json")) {
    arguments.hf_model = std::exchange(arguments.load, std::nullopt);
  } else if (!diffusion.pipeline.empty()) {
    arguments.hf_model = diffusion.model_folder();
  }
}

std::vector<std::string> diffusers_paths(const std::vector<std::string>& patterns) {
  static const std::map<std::string, std::string> kNames{{"head", "proj_out"},
                                                         {"double_blocks", "transformer_blocks"},
                                                         {"patchify_proj", "proj_in"},
                                                         {"audio_patchify_proj", "audio_proj_in"}};
  std::vector<std::string> paths;
  for (std::string path : patterns) {
    if (is_encoder(path)) continue;
    for (const std::string outer : {"predictor.", "wan_dit.", "vace_dit.", "transformer."}) {
      if (path.starts_with(outer)) path.erase(0, outer.size());
    }
    const auto end = std::min(path.find('.'), path.size());
    const auto found = kNames.find(path.substr(0, end));
    paths.push_back(found == kNames.end() ? path : found->second + path.substr(end));
  }
  return paths;
}

std::vector<std::string> diffusers_layers(const std::vector<std::string>& names) {
  static const std::map<std::string, std::string> kNames{{"proj_q", "to_q"},          {"proj_k", "to_k"},
                                                         {"proj_v", "to_v"},          {"proj_out", "to_out.0"},
                                                         {"ffn.0", "ffn.net.0.proj"}, {"ffn.2", "ffn.net.2"}};
  std::vector<std::string> layers;
  for (const std::string& name : comma_words(names)) {
    const auto found = kNames.find(name);
    layers.push_back(found == kNames.end() ? name : found->second);
  }
  return layers;
}

}  // namespace megashard
