#include "launch/checkpoints/conversion_places.h"

#include <algorithm>
#include <filesystem>

#include "checkpoint/files/file_io.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/steps/folder_content.h"
#include "checkpoint/steps/retention.h"
#include "framework/diagnostics.h"
#include "framework/modules/model_registry.h"
#include "launch/output/terminal.h"
#include "models/register_models.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

/// Resolves links and `..` of the existing part; no trailing slash.
fs::path real(const std::string& path) {
  std::error_code error;
  auto resolved = fs::weakly_canonical(fs::absolute(path), error);
  if (error) resolved = fs::absolute(path).lexically_normal();
  return resolved.has_filename() ? resolved : resolved.parent_path();
}

bool lies_in(const fs::path& path, const fs::path& folder) {
  const auto differs = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return differs.first == folder.end();
}

void throw_refusal(const std::string& refusal) {
  if (!refusal.empty()) throw UsageError(refusal);
}

void refuse_same(const GivenPath& source, const GivenPath& target) {
  if (real(source.path) == real(target.path)) {
    throw UsageError(target.flag + " " + target.path + " is the folder that " + source.flag + " names; give another");
  }
}

/// Refuses the source itself, and a path inside a source step, which would be removed with it.
void refuse_source(const GivenPath& source, const GivenPath& target) {
  refuse_same(source, target);
  const bool is_step = content_of(source.path).kind == FolderContent::Kind::kStep;
  if (is_step && lies_in(real(target.path), real(source.path))) {
    throw UsageError(target.flag + " " + target.path + " lies in the folder that " + source.flag +
                     " names, and belongs to that step then; give another");
  }
}

bool holds_step_alone(const std::string& folder) {
  const auto is_file = [](const fs::directory_entry& entry) { return entry.is_regular_file(); };
  return content_of(folder).kind == FolderContent::Kind::kStep &&
         std::all_of(fs::directory_iterator(folder), fs::directory_iterator(), is_file);
}

}  // namespace

std::string step_folder(const std::string& path) {
  const std::string folder = resolve_best_step(path);
  if (content_of(folder).kind != FolderContent::Kind::kRun) return folder;
  const auto step = find_step(folder, nullptr, {.depth = VerifyDepth::kSizes, .notice = print_line});
  if (!step) return folder;
  print_line("step: " + step->folder);
  return step->folder;
}

void add_overwrite(CLI::App& app, bool& overwrite) {
  app.add_flag("--overwrite", overwrite,
               "write into a place that holds weights, a step or a run; what has the names of new "
               "files is replaced when these are complete");
}

void check_hf_target(const GivenPath& source, const GivenPath& target, bool overwrite) {
  refuse_source(source, target);
  throw_refusal(folder_refusal(target.path, target.flag, overwrite));
}

void check_step_target(const GivenPath& source, const GivenPath& target, const std::string& step, bool overwrite) {
  refuse_source(source, target);
  if (real(target.path + "/" + step) == real(source.path)) {
    throw UsageError(target.flag + " " + target.path + " would replace the step that " + source.flag +
                     " names; give another folder");
  }
  throw_refusal(folder_refusal(target.path, target.flag, overwrite));
}

void check_file_target(const GivenPath& source, const GivenPath& target, bool overwrite) {
  refuse_source(source, target);
  throw_refusal(file_refusal(target.path, target.flag, overwrite));
}

void check_whole_folder(const GivenPath& source, const GivenPath& target, bool overwrite) {
  if (lies_in(real(source.path), real(target.path))) {
    throw UsageError(target.flag + " " + target.path + " holds the file that " + source.flag +
                     " names; give another folder");
  }
  const bool is_full = is_directory(target.path) && !fs::is_empty(target.path);
  if (is_full && overwrite && !holds_step_alone(target.path)) {
    throw UsageError(target.flag + " " + target.path +
                     ": --overwrite replaces a folder that holds a step and nothing else; give "
                     "another");
  }
  throw_refusal(folder_refusal(target.path, target.flag, overwrite));
  if (is_full && !overwrite)
    throw UsageError(target.flag + " " + target.path + " is not empty: give a folder of its own");
}

void MegatronLayoutFlags::add(CLI::App& app) {
  app.add_flag("--megatron-layout", use,
               "the torch_dist side has megatron-core's names and rows: linear_qkv by groups, "
               "linear_fc1 of gate and up, a padded vocabulary");
  app.add_option("--make-vocab-size-divisible-by", make_vocab_size_divisible_by,
                 "of the padding, as in Megatron [128]");
  app.add_option("--tensor-model-parallel-size", tensor_model_parallel_size,
                 "times it, as in Megatron [1]; nothing else depends on it");
}

std::optional<MegatronLayout> MegatronLayoutFlags::layout(const std::string& hf_dir, const std::string& flag) const {
  if (!use) return std::nullopt;
  for (const auto& [name, value] : {std::pair("--make-vocab-size-divisible-by", make_vocab_size_divisible_by),
                                    std::pair("--tensor-model-parallel-size", tensor_model_parallel_size)}) {
    if (value < 1) throw UsageError(std::string(name) + " is " + std::to_string(value) + "; it must be at least 1.");
  }
  if (hf_dir.empty()) {
    throw UsageError("--megatron-layout needs " + flag +
                     ": the model's config.json says how many heads and groups there are");
  }
  ModelRegistry registry;
  register_models(registry);
  return registry.layout(hf_dir, make_vocab_size_divisible_by * tensor_model_parallel_size);
}

}  // namespace megashard
