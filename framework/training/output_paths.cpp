#include "framework/training/output_paths.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <stdexcept>

#include "checkpoint/steps/agreement.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

/// Why a path is of no use.
struct Unusable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void give_up(const std::string& what, int error) {
  throw Unusable(what + ": " + std::strerror(error));
}

std::string parent_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

/// False when nothing has that name; a link to nothing is of no use.
bool find_status(const std::string& path, struct stat& status) {
  if (::stat(path.c_str(), &status) == 0) return true;
  const int error = errno;
  if (::lstat(path.c_str(), &status) == 0) {
    std::error_code unread;
    give_up(path + " is a link to " + std::filesystem::read_symlink(path, unread).string(), error);
  }
  if (error != ENOENT && error != ENOTDIR) give_up(path, error);
  return false;
}

/// The folder itself, or where the first folder towards it is to be made.
std::string nearest_folder(std::string path) {
  struct stat status {};
  while (!find_status(path, status)) path = parent_of(path);
  if (!S_ISDIR(status.st_mode)) throw Unusable(path + " is no folder");
  return path;
}

/// Makes a folder of a name that no other rank gives one.
std::string make_trial_folder(const std::string& folder) {
  auto path = folder + "/.try.XXXXXX";
  if (!::mkdtemp(path.data())) give_up("no folder can be made in " + folder, errno);
  return path;
}

void make_and_remove_file(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) give_up("no file can be made in " + parent_of(parent_of(path)), errno);
  const int error = ::write(descriptor, "\n", 1) == 1 ? 0 : errno;
  ::close(descriptor);
  ::unlink(path.c_str());
  if (error != 0) give_up("nothing can be written in " + parent_of(parent_of(path)), error);
}

void try_folder(const std::string& path) {
  const auto trial = make_trial_folder(nearest_folder(path));
  try {
    make_and_remove_file(trial + "/file");
  } catch (const Unusable&) {
    ::rmdir(trial.c_str());
    throw;
  }
  ::rmdir(trial.c_str());
}

void try_file(const std::string& path) {
  struct stat status {};
  if (!find_status(path, status)) return try_folder(parent_of(path));
  if (S_ISDIR(status.st_mode)) throw Unusable("it is a folder");
  if (!S_ISREG(status.st_mode)) return;  // a terminal, a pipe: opening one has effects
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (descriptor < 0) give_up(path, errno);
  ::close(descriptor);
}

/// Runs `attempt` on all ranks, and gathers what it returns; where one cannot write, all throw.
std::vector<std::string> on_all_ranks(const OutputPath& output, const ProcessGroupPtr& group,
                                      const std::function<std::string()>& attempt) {
  constexpr char kUnusable = '!';
  const auto answers = gather_or_throw(group, [&]() -> std::string {
    try {
      if (output.path.empty()) throw Unusable("it is empty");
      return attempt();
    } catch (const Unusable& error) {
      return kUnusable + std::string(error.what());
    }
  });
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (!answers[rank].starts_with(kUnusable)) continue;
    throw UsageError(output.flag + " " + output.path + " cannot be written" +
                     (rank > 0 ? " by rank " + std::to_string(rank) : "") + ": " +
                     answers[rank].substr(1) + "; give a " +
                     (output.kind == OutputPath::Kind::kFile ? "file" : "folder") +
                     " that can be written");
  }
  return answers;
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
    struct stat status {};
    if (!find_status(trial, status)) {
      throw Unusable(
          "it is another folder there than on rank 0, and all ranks must see one, on a file system "
          "that their machines share");
    }
    make_and_remove_file(trial + "/rank_" + std::to_string(rank_in(group)));
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
