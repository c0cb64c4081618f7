#include <filesystem>
#include <memory>
#include <string>

#include "checkpoint/convert/step_conversion.h"
#include "launch/arguments/model_folder.h"
#include "launch/checkpoints/conversion_places.h"
#include "launch/checkpoints/converters.h"
#include "launch/output/status_line.h"
#include "launch/output/terminal.h"

namespace megashard {
namespace {

std::string step_name_of(const std::string& folder) {
  const auto path = std::filesystem::absolute(folder).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

void add_step_conversion(CLI::App& app, CheckpointFormat from, CheckpointFormat to) {
  struct Flags {
    StepConversion options;
    MegatronLayoutFlags layout;
    std::string model_assets_dir;
  };
  const auto flags = std::make_shared<Flags>();
  flags->options.from = from;
  flags->options.to = to;
  app.add_option("--load-dir", flags->options.load_dir,
                 "a step's folder, a training's (its latest whole step), or .../best")
      ->type_name("DIR")
      ->required();
  app.add_option("--save-dir", flags->options.save_dir,
                 "gets the step under the same name, and latest_checkpointed_iteration.txt if it "
                 "is the newest")
      ->type_name("DIR")
      ->required();
  app.add_option("--model-assets-dir", flags->model_assets_dir,
                 "with --megatron-layout: whose config.json describes the model")
      ->type_name("DIR")
      ->each([](const std::string& folder) { require_model_folder("--model-assets-dir", folder); });
  flags->layout.add(app);
  add_overwrite(app, flags->options.overwrite);
  app.callback([flags] {
    flags->options.load_dir = step_folder(flags->options.load_dir);
    const auto& options = flags->options;
    check_step_target({options.load_dir, "--load-dir"}, {options.save_dir, "--save-dir"},
                      step_name_of(options.load_dir), options.overwrite);
    const auto layout = flags->layout.layout(flags->model_assets_dir, "--model-assets-dir");
    flags->options.megatron_layout = layout ? &*layout : nullptr;
    convert_step(flags->options, print_over_status);
    print_line("written: " + flags->options.save_dir);
  });
}

}  // namespace

void add_dcp_to_torch_dist(CLI::App& app) {
  add_step_conversion(app, CheckpointFormat::kTorchDcp, CheckpointFormat::kTorchDist);
}

void add_torch_dist_to_dcp(CLI::App& app) {
  add_step_conversion(app, CheckpointFormat::kTorchDist, CheckpointFormat::kTorchDcp);
}

}  // namespace megashard
