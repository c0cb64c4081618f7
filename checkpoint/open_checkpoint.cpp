#include "checkpoint/open_checkpoint.h"

#include <c10/util/Exception.h>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_reader.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/readers/torch_file.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/torch_dist/torch_dist_reader.h"

namespace megashard {
namespace {

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

}  // namespace

std::unique_ptr<CheckpointReader> open_checkpoint(const std::string& given, std::optional<int64_t> ckpt_step,
                                                  const std::function<void(const std::string& line)>& notice) {
  const auto path = without_slash(given);
  TORCH_CHECK_VALUE(path_exists(path), "there is no file or folder ", path);
  if (!is_directory(path)) {
    TORCH_CHECK_VALUE(!ckpt_step, "--ckpt-step goes with the directory of a training, and ", path, " is a file");
    if (is_zip(InputFile(path))) return std::make_unique<TorchFile>(path);
    return open_safetensors(path);
  }
  if (!ckpt_step) {
    const auto has = [&](const char* name) { return path_exists(path + "/" + name); };
    if (has(kDcpMetadataFile) || has(kFormatFile)) return open_step(path);
    if (has(kHfWeightsFile) || has(kHfIndexFile)) return open_hf_weights(path);
  }
  const auto step = ckpt_step ? std::optional(step_at(path, *ckpt_step))
                              : find_step(path, nullptr, {.depth = VerifyDepth::kSizes, .notice = notice});
  TORCH_CHECK_VALUE(step, path,
                    " is no checkpoint: it has no .metadata, no model.safetensors and no "
                    "latest_checkpointed_iteration.txt");
  return open_step(step->folder);
}

std::unique_ptr<CheckpointReader> open_step(const std::string& folder) {
  const auto format = detect_format(folder);
  const bool is_dist = format == CheckpointFormat::kTorchDist;
  return std::make_unique<DcpReader>(folder, format,
                                     is_dist ? read_torch_dist_metadata(folder) : read_dcp_metadata(folder));
}

std::unique_ptr<CheckpointReader> open_step_for(const ModelNames& model, const std::string& folder, StepNames* found) {
  if (detect_format(folder) == CheckpointFormat::kTorchDist) return open_step(folder);
  auto metadata = read_dcp_metadata(folder);
  const auto names = take_own_names(metadata, model);
  if (found != nullptr) *found = names;
  return std::make_unique<DcpReader>(folder, CheckpointFormat::kTorchDcp, std::move(metadata));
}

}  // namespace megashard
