#include <memory>
#include <string>

#include "checkpoint/convert/convert_dcp_to_torch.h"
#include "checkpoint/convert/convert_torch_to_dcp.h"
#include "checkpoint/steps/best_step.h"
#include "launch/checkpoints/conversion_places.h"
#include "launch/checkpoints/converters.h"
#include "launch/output/print_line.h"
#include "launch/output/status_line.h"

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
  app.add_option(kFolderFlag, flags->folder, "step folder: .../iter_0000100, .../release or .../best")->required();
  app.add_option(kPathFlag, flags->path, "gets the file that torch.load reads")->required();
  add_overwrite(app, flags->overwrite);
  app.callback([flags] {
    flags->folder = resolve_best_step(flags->folder);
    check_file_target(flags->given_folder(), flags->given_path(), flags->overwrite);
    convert_dcp_to_torch(flags->folder, flags->path, print_over_status, flags->overwrite);
    print_line("written: " + flags->path);
  });
}

void add_torch_to_dcp(CLI::App& app) {
  const auto flags = std::make_shared<TorchFlags>();
  app.add_option(kPathFlag, flags->path, "a state dict that torch.save wrote")->required();
  app.add_option(kFolderFlag, flags->folder, "gets .metadata and the data")->required();
  add_overwrite(app, flags->overwrite);
  app.callback([flags] {
    check_whole_folder(flags->given_path(), flags->given_folder(), flags->overwrite);
    convert_torch_to_dcp(flags->path, flags->folder, print_over_status, flags->overwrite);
    print_line("written: " + flags->folder);
  });
}

}  // namespace megashard
