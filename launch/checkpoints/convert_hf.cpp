#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/convert/convert_hf_to_step.h"
#include "checkpoint/convert/convert_step_to_hf.h"
#include "checkpoint/hugging_face/hf_files.h"
#include "framework/arguments/argument_value.h"
#include "framework/diagnostics.h"
#include "launch/arguments/model_folder.h"
#include "launch/checkpoints/conversion_places.h"
#include "launch/checkpoints/converters.h"
#include "launch/output/status_line.h"
#include "launch/output/terminal.h"
#include "models/hugging_face/weight_check.h"

namespace megashard {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

/// Parses MindSpeed-MM's two forms of a mapping, a JSON object and "target,source,...", and target=source.
Pairs parse_mapping(const std::vector<std::string>& words) {
  constexpr const char* kForms = "--tie-weight-mapping takes target=source, or target1,source1,..., or "
                                 "{\"target\": \"source\"}; got '";
  Pairs pairs;
  for (const auto& word : words) {
    const auto object = nlohmann::json::parse(word, nullptr, /*allow_exceptions=*/false);
    if (object.is_object()) {
      for (const auto& [target, source] : object.items()) {
        if (!source.is_string()) throw UsageError(kForms + word + "'");
        pairs.emplace_back(target, source.get<std::string>());
      }
      continue;
    }
    const auto equals = word.find('=');
    if (equals != std::string::npos) {
      pairs.emplace_back(word.substr(0, equals), word.substr(equals + 1));
      continue;
    }
    const auto parts = comma_words({word});
    if (parts.empty() || parts.size() % 2 != 0) throw UsageError(kForms + word + "'");
    for (size_t i = 0; i < parts.size(); i += 2) pairs.emplace_back(parts[i], parts[i + 1]);
  }
  return pairs;
}

/// Parses comma-separated names, or MindSpeed-MM's list: [a, b] with or without quotes.
std::vector<std::string> parse_names(const std::vector<std::string>& words) {
  auto names = comma_words(words);
  for (auto& name : names) {
    std::erase_if(name, [](char c) { return c == '[' || c == ']' || c == '"' || c == '\'' || c == ' '; });
  }
  std::erase(names, "");
  return names;
}

/// Prints a line if weights cannot be compared with config.json.
void tell_unknown(const WeightCheck& config) {
  if (!config.unknown().empty()) print_line("the weights are not compared with config.json: " + config.unknown());
}

/// The forms that a converter makes: none if the user describes names, and no other shapes beside the user's.
WeightMap wanted_forms(const WeightCheck& config, bool names_are_given, bool shapes_are_given) {
  if (names_are_given) return {};
  auto weights = config.weights();
  if (shapes_are_given) weights.groups.clear();
  return weights;
}

/// `save_flag` is the flag of the output path.
void add_hf_to_step(CLI::App& app, CheckpointFormat format, const char* save_flag) {
  struct Flags {
    HfToStepOptions options;
    MegatronLayoutFlags layout;
    std::vector<std::string> ties;
    std::vector<std::string> fused;
  };
  const auto flags = std::make_shared<Flags>();
  auto& options = flags->options;
  options.format = format;
  app.add_option("--hf-dir", options.hf_dir, "Hugging Face model directory (safetensors)")
      ->type_name("DIR")
      ->required()
      ->each([](const std::string& folder) { require_model_folder("--hf-dir", folder); });
  app.add_option(save_flag, options.save_dir,
                 "gets release/, and latest_checkpointed_iteration.txt unless it names an iteration")
      ->type_name("DIR")
      ->required();
  app.add_option("--dcp-prefix", options.dcp_prefix, "stands behind \"model.\" in the key, in the place of --hf-prefix")
      ->type_name("PREFIX");
  app.add_option("--hf-prefix", options.hf_prefix,
                 "the beginning of names that --dcp-prefix replaces; other names stay")
      ->type_name("PREFIX");
  app.add_option("--tie-weight-mapping", flags->ties, "target=source: store the weight source as target too")
      ->type_name("NAME=NAME");
  app.add_option("--fused-linear-names", flags->fused,
                 "parts of names of stacked experts [E, I, O], stored as [E * I, O]")
      ->type_name("NAME");
  app.add_flag("--to-bf16", options.to_bf16, "floating weights as bfloat16 (default: as stored)");
  add_overwrite(app, options.overwrite);
  if (format == CheckpointFormat::kTorchDist) flags->layout.add(app);
  app.callback([flags, save_flag = std::string(save_flag)] {
    auto& options = flags->options;
    check_step_target({options.hf_dir, "--hf-dir"}, {options.save_dir, save_flag}, "release", options.overwrite);
    const auto layout = flags->layout.layout(options.hf_dir, "--hf-dir");
    options.megatron_layout = layout ? &*layout : nullptr;
    options.tie_weight_mapping = parse_mapping(flags->ties);
    options.fused_linear_names = parse_names(flags->fused);
    const bool names_are_given = !options.dcp_prefix.empty() || !options.hf_prefix.empty();
    const WeightCheck config(options.hf_dir);
    options.weights = wanted_forms(config, names_are_given, !flags->fused.empty());
    options.check = [&](const std::vector<TensorInfo>& weights) {
      tell_unknown(config);
      config.check_files(weights, names_are_given);
      const auto others = std::ranges::count_if(
          weights, [&](const TensorInfo& info) { return config.weights().leaves_out(info.name); });
      if (others > 0) print_line(std::to_string(others) + " tensors of the model beside this one are left out");
    };
    convert_hf_to_step(options, print_over_status);
    print_line("written: " + options.save_dir + "/release");
  });
}

void add_step_to_hf(CLI::App& app, CheckpointFormat format) {
  struct Flags {
    StepToHfOptions options;
    MegatronLayoutFlags layout;
    std::vector<std::string> fused;
    bool trust_remote_code = false;
    bool overwrite = false;
  };
  const auto flags = std::make_shared<Flags>();
  auto& options = flags->options;
  options.format = format;
  app.add_option("--load-dir", options.load_dir, "a step's folder, a training's (its latest whole step), or .../best")
      ->type_name("DIR")
      ->required();
  app.add_option("--save-dir", options.save_dir, "gets the Hugging Face model directory")->type_name("DIR")->required();
  app.add_option("--model-assets-dir", options.model_assets_dir, "config and tokenizer files to copy")
      ->type_name("DIR")
      ->required()
      ->each([](const std::string& folder) { require_model_folder("--model-assets-dir", folder); });
  app.add_option("--dcp-prefix", options.dcp_prefix,
                 "the beginning of keys, behind \"model.\", that --hf-prefix replaces; others stay")
      ->type_name("PREFIX");
  app.add_option("--hf-prefix", options.hf_prefix, "stands in its place")->type_name("PREFIX");
  app.add_option("--fused-linear-names", flags->fused,
                 "parts of names of matrices [E * I, O] that are stacked experts [E, I, O]")
      ->type_name("NAME");
  app.add_flag("--to-bf16", options.to_bf16, "floating weights as bfloat16 (default: as stored)");
  app.add_flag("--trust-remote-code", flags->trust_remote_code,
               "taken for MindSpeed-MM's sake: no code of the assets is ever run");
  app.add_option("--max-shard-size", options.max_shard_bytes, "of a safetensors file [5GB]")
      ->type_name("SIZE")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true));
  add_overwrite(app, flags->overwrite);
  if (format == CheckpointFormat::kTorchDist) flags->layout.add(app);
  app.callback([flags] {
    auto& options = flags->options;
    options.load_dir = step_folder(options.load_dir);
    check_hf_target({options.load_dir, "--load-dir"}, {options.save_dir, "--save-dir"}, flags->overwrite);
    const auto layout = flags->layout.layout(options.model_assets_dir, "--model-assets-dir");
    options.megatron_layout = layout ? &*layout : nullptr;
    options.fused_linear_names = parse_names(flags->fused);
    const WeightCheck config(options.model_assets_dir);
    tell_unknown(config);
    options.stem = config.stem();
    options.change_config = config.change_config();
    const bool names_are_given = !options.dcp_prefix.empty() || !options.hf_prefix.empty();
    options.weights = wanted_forms(config, names_are_given, !flags->fused.empty());
    if (!names_are_given && layout == std::nullopt) options.names = config.names();
    options.check = [&](const std::vector<TensorInfo>& weights) { config.check_step(weights, options.load_dir); };
    convert_step_to_hf(options, print_over_status);
    print_line("written: " + options.save_dir);
  });
}

}  // namespace

void add_hf_to_dcp(CLI::App& app) { add_hf_to_step(app, CheckpointFormat::kTorchDcp, "--dcp-dir"); }
void add_hf_to_torch_dist(CLI::App& app) { add_hf_to_step(app, CheckpointFormat::kTorchDist, "--save-dir"); }
void add_dcp_to_hf(CLI::App& app) { add_step_to_hf(app, CheckpointFormat::kTorchDcp); }
void add_torch_dist_to_hf(CLI::App& app) { add_step_to_hf(app, CheckpointFormat::kTorchDist); }

}  // namespace megashard
