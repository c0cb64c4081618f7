#include "checkpoint/files/trial_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "checkpoint/files/file_io.h"

namespace megashard {
namespace {

[[noreturn]] void give_up(const std::string& what, int error) {
  throw UnwritableError(what + ": " + std::strerror(error));
}

/// False if the path does not exist. Throws for a dangling link.
bool is_there(const std::string& path, struct stat& status) {
  if (::stat(path.c_str(), &status) == 0) return true;
  const int error = errno;
  if (::lstat(path.c_str(), &status) == 0) {
    std::error_code unread;
    give_up(path + " is a link to " + std::filesystem::read_symlink(path, unread).string(), error);
  }
  if (error != ENOENT && error != ENOTDIR) give_up(path, error);
  return false;
}

}  // namespace

std::string nearest_folder(std::string path) {
  struct stat status {};
  while (!is_there(path, status)) path = parent_of(path);
  if (!S_ISDIR(status.st_mode)) throw UnwritableError(path + " is no folder");
  return path;
}

std::string make_trial_folder(const std::string& folder) {
  auto path = folder + "/.try.XXXXXX";
  if (!::mkdtemp(path.data())) give_up("no folder can be made in " + folder, errno);
  return path;
}

void write_trial_file(const std::string& path) {
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
    write_trial_file(trial + "/file");
  } catch (const UnwritableError&) {
    ::rmdir(trial.c_str());
    throw;
  }
  ::rmdir(trial.c_str());
}

void try_file(const std::string& path) {
  struct stat status {};
  if (!is_there(path, status)) return try_folder(parent_of(path));
  if (S_ISDIR(status.st_mode)) throw UnwritableError("it is a folder");
  if (!S_ISREG(status.st_mode)) return;  // a terminal, a pipe: opening one has side effects
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (descriptor < 0) give_up(path, errno);
  ::close(descriptor);
}

}  // namespace megashard
