#include "checkpoint/checkpoint.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <map>
#include <set>
#include <utility>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_reader.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/readers/torch_file.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/torch_dist/torch_dist_reader.h"
#include "checkpoint/torch_dist/torch_dist_writer.h"
#include "checkpoint/values/gather_values.h"
#include "checkpoint/values/tensor_info.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {
namespace {

Value checksums(const ShardedTensors& tensors) {
  Dict sums;
  for (const auto& [key, tensor] : tensors) {
    const bool is_whole = tensor.is_replicated() && tensor.local.sizes() == at::IntArrayRef(tensor.global_sizes);
    if (!is_whole || !is_model_key(key)) continue;
    const auto local = tensor.local.detach().cpu().contiguous();
    sums.set(key, int64_t{crc32(0, local.const_data_ptr(), static_cast<int64_t>(local.nbytes()))});
  }
  return sums;
}

/// Names of the model's unsharded tensors, such as running statistics of BatchNorm, whose bytes differ between ranks.
/// Collective over `group` (null: this process alone).
std::vector<std::string> differing_copies(const ShardedTensors& tensors, const ProcessGroupPtr& group) {
  std::map<std::string, std::set<int64_t>> sums;
  for (const auto& of_rank : gather_values(group, [&] { return checksums(tensors); })) {
    for (const auto& [key, sum] : of_rank.as_dict().entries) sums[key.as_string()].insert(sum.as_int());
  }
  std::vector<std::string> names;
  for (const auto& [key, different] : sums) {
    if (different.size() > 1) names.push_back(key);
  }
  return names;
}

/// Logs tensors that differ between ranks, once for all saves that share `options.plans`. Collective.
void tell_differing_copies(const ShardedTensors& tensors, const ProcessGroupPtr& group, const SaveOptions& options) {
  if (group == nullptr || group->size() == 1) return;
  const auto names = differing_copies(tensors, group);
  const bool is_told = options.plans != nullptr && std::exchange(options.plans->told_of_copies, !names.empty());
  if (names.empty() || is_told || rank_in(group) != 0 || !options.notice) return;
  options.notice("these differ between the ranks, and no sharding keeps them equal: " + listed(names) +
                 "; a checkpoint has those of the first rank, which every rank gets when it is loaded");
}

}  // namespace

void save_checkpoint(const std::string& directory, int64_t iteration, const ShardedTensors& tensors, const Dict& values,
                     const ProcessGroupPtr& group, const SaveOptions& options) {
  const bool first_rank = rank_in(group) == 0;
  StepWriter step(directory, iteration);
  try {
    all_or_throw(group, [&] {
      if (first_rank) step.begin();
    });
    tell_differing_copies(tensors, group, options);
    const auto files = options.format == CheckpointFormat::kTorchDist
                           ? save_torch_dist(step.folder(), tensors, values, group, options.plans.get())
                           : save_dcp(step.folder(), tensors, values, group, options.plans.get(),
                                      {.tied = options.tied, .bare_names = options.bare_names});
    all_or_throw(group, [&] {
      if (first_rank) step.commit(files, options.run);
    });
  } catch (...) {
    if (first_rank) step.abandon();
    meet_after_failure(group);
    throw;
  }
  if (!options.retention.removes()) return;
  try {
    all_or_rethrow(group, [&] {  // the other ranks wait here, not in a training collective
      if (first_rank) remove_old_steps(directory, iteration, options.retention);
    });
  } catch (const std::exception& error) {  // the step is saved nevertheless
    if (first_rank && options.notice) options.notice("old checkpoints are kept: " + error_text(error));
  }
}

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
    if (has_hf_weights(path)) return open_hf_weights(path);
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
