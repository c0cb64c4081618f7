#include <memory>
#include <string>

#include "checkpoint/convert/convert_dcp_to_torch.h"
#include "checkpoint/convert/convert_torch_to_dcp.h"
#include "launch/checkpoints/converters.h"
#include "launch/print_line.h"

namespace megashard {
namespace {

struct TorchFlags {
  std::string folder;
  std::string path;
};

constexpr const char* kFolderFlag = "--dcp-checkpoint-dir,--dcp-dir";
constexpr const char* kPathFlag = "--torch-save-path";

}  // namespace

void add_dcp_to_torch(CLI::App& app) {
  const auto flags = std::make_shared<TorchFlags>();
  app.add_option(kFolderFlag, flags->folder, "step folder: .../iter_0000100 or .../release")
      ->required();
  app.add_option(kPathFlag, flags->path, "gets the file that torch.load reads")->required();
  app.callback([flags] {
    convert_dcp_to_torch(flags->folder, flags->path, print_line);
    print_line("written: " + flags->path);
  });
}

void add_torch_to_dcp(CLI::App& app) {
  const auto flags = std::make_shared<TorchFlags>();
  app.add_option(kPathFlag, flags->path, "a state dict that torch.save wrote")->required();
  app.add_option(kFolderFlag, flags->folder, "gets .metadata and the data")->required();
  app.callback([flags] {
    convert_torch_to_dcp(flags->path, flags->folder, print_line);
    print_line("written: " + flags->folder);
  });
}

}  // namespace megashard
