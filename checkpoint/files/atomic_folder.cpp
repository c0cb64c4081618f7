#include "checkpoint/files/atomic_folder.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "checkpoint/files/file_io.h"

namespace megashard {
namespace {

constexpr const char* kUnfinished = ".tmp";
constexpr const char* kAside = ".old";
constexpr const char* kRemoved = ".removed";

std::string hidden_beside(const std::string& path, const char* suffix) {
  const std::filesystem::path named(path);
  return (named.parent_path() / ("." + named.filename().string() + suffix)).string();
}

/// NAME of .NAMESUFFIX; empty for other names.
std::string name_of_hidden(const std::string& hidden, const std::string& suffix) {
  const bool is_such = hidden.starts_with(".") && hidden.ends_with(suffix) && hidden.size() > suffix.size();
  return is_such ? hidden.substr(1, hidden.size() - 1 - suffix.size()) : "";
}

/// False if another process has the lock. True if the file system has no such locks.
bool take_lock(int descriptor) { return ::flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; }

bool is_locked(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return false;
  const bool is_free = take_lock(descriptor);
  ::close(descriptor);
  return !is_free;
}

/// Locks the folder until the last copy of the pointer is destroyed or the process ends.
std::shared_ptr<void> lock_folder(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TORCH_CHECK(descriptor >= 0, "cannot open the folder ", folder, ": ", std::strerror(errno));
  std::shared_ptr<void> lock(new int(descriptor), [](int* held) {
    ::close(*held);
    delete held;
  });
  TORCH_CHECK(take_lock(descriptor), folder, " is being written by another process: two runs save to one directory");
  return lock;
}

}  // namespace

AtomicFolder::AtomicFolder(const std::string& path)
    : path_(path), hidden_(hidden_beside(path, kUnfinished)), aside_(hidden_beside(path, kAside)) {}

void AtomicFolder::begin() {
  try {
    make_directories(hidden_);
  } catch (...) {
    ::rmdir(hidden_.c_str());  // it exists, but not durably
    throw;
  }
  lock_ = lock_folder(hidden_);
  for (const auto& left : names_in(hidden_)) remove_directory(hidden_ + "/" + left);
}

void AtomicFolder::publish() {
  if (!path_exists(path_)) {
    rename_durably(hidden_, path_);
  } else if (swap_folders(hidden_, path_)) {
    remove_directory(hidden_);
  } else {
    rename_durably(path_, aside_);
    rename_durably(hidden_, path_);
    remove_directory(aside_);
  }
  lock_ = nullptr;
}

void AtomicFolder::abandon() noexcept {
  if (lock_ == nullptr) return;  // not begun, or published
  try {
    remove_directory(hidden_);
    if (path_exists(path_)) {
      remove_directory(aside_);
    } else if (path_exists(aside_)) {
      rename_durably(aside_, path_);
    }
    lock_ = nullptr;
  } catch (const std::exception&) {  // the next writer retries and reports it
  }
}

bool is_unfinished(const std::string& path) { return is_directory(hidden_beside(path, kUnfinished)); }

void remove_atomically(const std::string& path) {
  const auto hidden = hidden_beside(path, kRemoved);
  remove_directory(hidden);
  rename_durably(path, hidden);
  remove_directory(hidden);
}

std::string name_of_aside(const std::string& hidden_name) { return name_of_hidden(hidden_name, kAside); }

void remove_leftovers(const std::string& parent, const std::function<bool(const std::string& name)>& is_ours) {
  for (const auto& hidden : names_in(parent)) {
    const auto path = parent + "/" + hidden;
    const auto has_suffix = [&](const char* suffix) {
      const auto name = name_of_hidden(hidden, suffix);
      return !name.empty() && is_ours(name);
    };
    const bool is_aside = has_suffix(kAside);
    if (is_aside && !path_exists(parent + "/" + name_of_aside(hidden))) {
      rename_durably(path, parent + "/" + name_of_aside(hidden));
    } else if (is_aside || has_suffix(kRemoved) || (has_suffix(kUnfinished) && !is_locked(path))) {
      remove_directory(path);
    }
  }
}

bool swap_folders(const std::string& one, const std::string& other) {
  if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0) {
    sync_directory(parent_of(other));
    return true;
  }
  const bool cannot = errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP;
  TORCH_CHECK(cannot, "cannot exchange ", one, " with ", other, ": ", std::strerror(errno));
  return false;
}

}  // namespace megashard
