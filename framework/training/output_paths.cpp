#include "framework/training/output_paths.h"

#include <unistd.h>

#include <filesystem>
#include <functional>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/trial_files.h"
#include "checkpoint/values/gather_values.h"
#include "framework/diagnostics.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

/// Runs `attempt` on all ranks, and gathers what it returns; where one cannot write, all throw.
std::vector<std::string> on_all_ranks(const OutputPath& output, const ProcessGroupPtr& group,
                                      const std::function<std::string()>& attempt) {
  const auto answers = gather_values(group, [&]() -> Value {
    try {
      if (output.path.empty()) throw UnwritableError("it is empty");
      return Tuple{{true, attempt()}};
    } catch (const UnwritableError& error) {
      return Tuple{{false, error.what()}};
    }
  });
  std::vector<std::string> results;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    results.push_back(answers[rank].as_items()[1].as_string());
    if (answers[rank].as_items()[0].as_bool()) continue;
    throw UsageError(output.flag + " " + output.path + " cannot be written" +
                     (rank > 0 ? " by rank " + std::to_string(rank) : "") + ": " + results.back() + "; give a " +
                     (output.kind == OutputPath::Kind::kFile ? "file" : "folder") + " that can be written");
  }
  return results;
}

/// The first rank makes a folder, and all write into it.
void try_shared_folder(const OutputPath& output, const ProcessGroupPtr& group) {
  const bool first_rank = rank_in(group) == 0;
  std::string folder;
  const auto names = on_all_ranks(output, group, [&]() -> std::string {
    folder = nearest_folder(output.path);
    if (!first_rank) return "";
    return std::filesystem::path(make_trial_folder(folder)).filename();
  });
  const auto trial = folder + "/" + names[0];
  const auto write = [&]() -> std::string {
    if (!is_directory(trial)) {
      throw UnwritableError("it is another folder there than on rank 0, and all ranks must see one, on a file system "
                            "that their machines share");
    }
    write_trial_file(trial + "/rank_" + std::to_string(rank_in(group)));
    return "";
  };
  try {
    on_all_ranks(output, group, write);
  } catch (...) {
    if (first_rank) ::rmdir(trial.c_str());
    throw;
  }
  if (first_rank) ::rmdir(trial.c_str());
}

}  // namespace

std::vector<OutputPath> output_paths(const Arguments& arguments, bool saves) {
  using Kind = OutputPath::Kind;
  std::vector<OutputPath> paths;
  const auto add = [&](const char* flag, const std::optional<std::string>& path, Kind kind) {
    if (path) paths.push_back({flag, *path, kind});
  };
  if (saves) add("--save", arguments.save, Kind::kSharedFolder);
  add("--ckpt-convert-save", arguments.ckpt_convert_save, Kind::kSharedFolder);
  add("--save-hf", arguments.save_hf, Kind::kSharedFolder);
  add("--fsdp-schedule-trace", arguments.fsdp_schedule_trace, Kind::kFolder);
  add("--metrics-file", arguments.metrics_file, Kind::kFile);
  add("--prometheus-file", arguments.prometheus_file, Kind::kFile);
  add("--tensorboard-dir", arguments.tensorboard_dir, Kind::kFolder);
  if (arguments.profile) add("--profile-save-path", arguments.profile_save_path, Kind::kFolder);
  return paths;
}

void try_output_paths(const std::vector<OutputPath>& paths, const ProcessGroupPtr& group) {
  for (const auto& output : paths) {
    if (output.kind == OutputPath::Kind::kSharedFolder) {
      try_shared_folder(output, group);
      continue;
    }
    on_all_ranks(output, group, [&]() -> std::string {
      if (output.kind == OutputPath::Kind::kFolder) {
        try_folder(output.path);
      } else if (rank_in(group) == 0) {
        try_file(output.path);
      }
      return "";
    });
  }
}

}  // namespace megashard
