#include "checkpoint/steps/run_lock.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <utility>

#include "checkpoint/files/file_io.h"

namespace megashard {
namespace {

std::string this_process() {
  char host[HOST_NAME_MAX + 1] = "";
  ::gethostname(host, HOST_NAME_MAX);
  return "process " + std::to_string(::getpid()) + " on " + host;
}

/// Text that the other process wrote; empty if it has not written it yet.
std::string owner(int descriptor) {
  char text[200];
  const auto bytes = ::pread(descriptor, text, sizeof text, 0);
  const std::string line(text, bytes > 0 ? static_cast<size_t>(bytes) : 0);
  return line.empty() ? "a process that has just begun" : line.substr(0, line.find('\n'));
}

std::vector<std::string> missing_folders(const std::string& directory) {
  std::vector<std::string> missing;
  std::filesystem::path path = directory;
  for (; !path.empty() && !path_exists(path); path = path.parent_path())
    if (path.has_filename()) missing.push_back(path);
  return missing;
}

/// True if the open file still has its name: the owner removes it when it ends.
bool is_current(int descriptor, const std::string& path) {
  struct stat open_one {};
  struct stat named {};
  return ::fstat(descriptor, &open_one) == 0 && ::stat(path.c_str(), &named) == 0 && open_one.st_ino == named.st_ino &&
         open_one.st_dev == named.st_dev;
}

}  // namespace

RunLock::RunLock(const std::string& directory) : path_(directory + "/.run"), made_(missing_folders(directory)) {
  make_directories(directory);
  while (!take()) {
  }
}

bool RunLock::is_ours() const { return is_held() && is_current(descriptor_, path_); }

bool RunLock::take_again() {
  if (!has_locks_ || (path_exists(path_) && is_ours())) return false;
  if (is_held()) ::close(std::exchange(descriptor_, -1));
  make_directories(parent_of(path_));
  while (!take()) {
  }
  return true;
}

/// Returns false if the owner has just removed the file.
bool RunLock::take() {
  const int descriptor = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  TORCH_CHECK(descriptor >= 0, "cannot create ", path_, ": ", std::strerror(errno));
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    const bool is_taken = errno == EWOULDBLOCK;
    const auto who = owner(descriptor);
    ::close(descriptor);
    const auto directory = path_.substr(0, path_.rfind('/'));
    TORCH_CHECK(!is_taken, "--save ", directory, " is in use by another run (", who,
                "): wait until that has ended, or end it, or give another folder");
    has_locks_ = false;
    return true;
  }
  if (!is_current(descriptor, path_)) {
    ::close(descriptor);
    return false;
  }
  descriptor_ = descriptor;
  const auto line = this_process() + "\n";
  const bool written = ::ftruncate(descriptor_, 0) == 0 &&
                       ::pwrite(descriptor_, line.data(), line.size(), 0) == static_cast<ssize_t>(line.size());
  const auto why = std::string(written ? "" : std::strerror(errno));
  if (!written) ::close(std::exchange(descriptor_, -1));
  TORCH_CHECK(written, "writing ", path_, " failed: ", why);
  return true;
}

RunLock::~RunLock() {
  if (!has_locks_ || is_ours()) ::unlink(path_.c_str());
  if (is_held()) ::close(descriptor_);
  for (const auto& folder : made_) ::rmdir(folder.c_str());
}

}  // namespace megashard
