#include <memory>
#include <string>

#include "checkpoint/convert/convert_torch.h"
#include "launch/checkpoints/conversion_places.h"
#include "launch/checkpoints/converters.h"
#include "launch/output/status_line.h"
#include "launch/output/terminal.h"

namespace megashard {
namespace {

constexpr const char* kFolderFlag = "--dcp-checkpoint-dir,--dcp-dir";
constexpr const char* kPathFlag = "--torch-save-path";

struct TorchFlags {
  std::string folder;
  std::string path;
  bool overwrite = false;
  GivenPath given_folder() const { return {folder, "--dcp-checkpoint-dir"}; }
  GivenPath given_path() const { return {path, kPathFlag}; }
};

}  // namespace

void add_dcp_to_torch(CLI::App& app) {
  const auto flags = std::make_shared<TorchFlags>();
  app.add_option(kFolderFlag, flags->folder, "a step's folder, a training's (its latest whole step), or .../best")
      ->type_name("DIR")
      ->required();
  app.add_option(kPathFlag, flags->path, "gets the file that torch.load reads")->type_name("FILE")->required();
  add_overwrite(app, flags->overwrite);
  app.callback([flags] {
    flags->folder = step_folder(flags->folder);
    check_file_target(flags->given_folder(), flags->given_path(), flags->overwrite);
    convert_dcp_to_torch(flags->folder, flags->path, print_over_status, flags->overwrite);
    print_line("written: " + flags->path);
  });
}

void add_torch_to_dcp(CLI::App& app) {
  const auto flags = std::make_shared<TorchFlags>();
  app.add_option(kPathFlag, flags->path, "a state dict that torch.save wrote")->type_name("FILE")->required();
  app.add_option(kFolderFlag, flags->folder, "gets .metadata and the data")->type_name("DIR")->required();
  add_overwrite(app, flags->overwrite);
  app.callback([flags] {
    check_whole_folder(flags->given_path(), flags->given_folder(), flags->overwrite);
    convert_torch_to_dcp(flags->path, flags->folder, print_over_status, flags->overwrite);
    print_line("written: " + flags->folder);
  });
}

}  // namespace megashard
