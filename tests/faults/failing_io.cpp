// This file defines functions with the C library's names: without this, its headers would rename them.
#undef _FILE_OFFSET_BITS

#include "tests/faults/failing_io.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace {

/// A change of a folder's entries that has not been synced yet.
struct Change {
  enum class Kind { kCreated, kRenamed, kExchanged, kRemoved } kind;
  std::string path;
  std::string from{};  ///< the old name in a rename
  std::string kept{};  ///< copy of the file that was removed or replaced by a rename
};

struct Disk {
  std::string folder;
  int64_t calls_left = -1;  ///< number of calls before the one that fails; -1: none fails
  int error = 0;
  bool all_later = false;
  bool failed = false;
  bool no_exchange = false;
  int listings_left = -1;         ///< -1: none fails
  std::string spoilt_ending;      ///< empty: no file is spoilt
  std::string unreadable_ending;  ///< empty: all files can be read
  megashard::testing::FailingDisk::Reading failing_call{};
  int read_error = 0;
  std::vector<Change> changes;
  std::set<std::string> unsynced;  ///< paths of files
  int number_kept = 0;
};

std::mutex mutex;
Disk* disk = nullptr;  // guarded by the mutex

std::string parent_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

std::string path_of(int descriptor) {
  char path[PATH_MAX];
  const auto link = "/proc/self/fd/" + std::to_string(descriptor);
  const auto length = ::readlink(link.c_str(), path, sizeof path);
  return length < 0 ? "" : std::string(path, static_cast<size_t>(length));
}

std::string path_at(int folder, const char* name) {
  return folder == AT_FDCWD || name[0] == '/' ? name : path_of(folder) + "/" + name;
}

bool is_ours(const std::string& path) {
  return disk != nullptr && (path == disk->folder || path.rfind(disk->folder + "/", 0) == 0);
}

/// True if this call is the one to fail.
bool is_hit() {
  if (disk->calls_left < 0 || (disk->failed && !disk->all_later)) return false;
  if (!disk->failed && disk->calls_left-- > 0) return false;
  disk->calls_left = 0;
  disk->failed = true;
  return true;
}

/// True if this call fails. Sets errno.
bool fails() {
  if (!is_hit() || disk->error == 0) return false;
  errno = disk->error;
  return true;
}

void move_path(std::string& path, const std::string& from, const std::string& to) {
  if (path == from || path.rfind(from + "/", 0) == 0) path = to + path.substr(from.size());
}

/// Renames recorded paths inside `from` to paths inside `to`.
void move_notes(const std::string& from, const std::string& to) {
  for (auto& change : disk->changes) {
    if (change.path.rfind(from + "/", 0) == 0) move_path(change.path, from, to);
    if (change.from.rfind(from + "/", 0) == 0) move_path(change.from, from, to);
  }
  std::set<std::string> moved;
  for (auto path : disk->unsynced) {
    move_path(path, from, to);
    moved.insert(path);
  }
  disk->unsynced = std::move(moved);
}

void exchange_notes(const std::string& one, const std::string& other) {
  move_notes(one, one + "\n");
  move_notes(other, one);
  move_notes(one + "\n", other);
}

/// Links the file under another name outside the folder, where no test lists it. Empty if `path` is no file.
std::string keep(const std::string& path) {
  auto kept = disk->folder + ".kept" + std::to_string(disk->number_kept++);
  const bool linked = ::syscall(SYS_linkat, AT_FDCWD, path.c_str(), AT_FDCWD, kept.c_str(), 0) == 0;
  return linked ? kept : "";
}

void forget(const Change& change) {
  if (!change.kept.empty()) ::syscall(SYS_unlinkat, AT_FDCWD, change.kept.c_str(), 0);
}

long rename_now(const std::string& from, const std::string& to, unsigned flags) {
  return ::syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags);
}

using Reading = megashard::testing::FailingDisk::Reading;

/// True if this call must fail. Sets errno. The caller holds the mutex.
bool reading_fails(const std::string& path, Reading call) {
  if (disk == nullptr || disk->unreadable_ending.empty() || disk->failing_call != call) return false;
  if (!is_ours(path) || !path.ends_with(disk->unreadable_ending)) return false;
  errno = disk->read_error;
  return true;
}

bool status_fails(const char* path) {
  const std::lock_guard lock(mutex);
  return reading_fails(path, Reading::kStatus);
}

ssize_t read_from(int descriptor, void* into, size_t bytes, off64_t offset) {
  {
    const std::lock_guard lock(mutex);
    if (disk != nullptr && reading_fails(path_of(descriptor), Reading::kRead)) return -1;
  }
  return ::syscall(SYS_pread64, descriptor, into, bytes, offset);
}

int opened(const char* path, int flags, mode_t mode) {
  const std::lock_guard lock(mutex);
  if ((flags & O_ACCMODE) == O_RDONLY && reading_fails(path, Reading::kOpen)) return -1;
  const bool writes = (flags & O_ACCMODE) != O_RDONLY && is_ours(path);
  if (writes && fails()) return -1;
  const bool is_new = writes && ::syscall(SYS_faccessat, AT_FDCWD, path, F_OK) != 0;
  const auto descriptor = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags | O_LARGEFILE, mode));
  if (writes && descriptor >= 0) {
    disk->unsynced.insert(path);
    if (is_new) disk->changes.push_back({Change::Kind::kCreated, path});
  }
  return descriptor;
}

int renamed(const char* from, const char* to, unsigned flags) {
  const std::lock_guard lock(mutex);
  if (!is_ours(from)) return static_cast<int>(rename_now(from, to, flags));
  if (fails()) return -1;
  if (flags != 0 && disk->no_exchange) {
    errno = EINVAL;
    return -1;
  }
  Change change{flags == 0 ? Change::Kind::kRenamed : Change::Kind::kExchanged, to, from};
  struct stat status {};
  const bool is_there = ::syscall(SYS_newfstatat, AT_FDCWD, to, &status, 0) == 0;
  const bool replaces = flags == 0 && is_there && S_ISREG(status.st_mode);
  if (replaces) change.kept = keep(to);
  const auto result = static_cast<int>(rename_now(from, to, flags));
  if (result != 0) return result;
  flags == 0 ? move_notes(from, to) : exchange_notes(from, to);
  disk->changes.push_back(change);
  return 0;
}

int removed(int folder, const char* name, int flags) {
  const std::lock_guard lock(mutex);
  const auto path = path_at(folder, name);
  if (is_ours(path) && fails()) return -1;
  const Change removal{Change::Kind::kRemoved, path, {}, is_ours(path) ? keep(path) : ""};
  const auto result = static_cast<int>(::syscall(SYS_unlinkat, folder, name, flags));
  bool was_there = !removal.kept.empty();  // when the folder was last synced
  if (result == 0 && is_ours(path)) {
    const auto since = std::erase_if(disk->changes, [&](const Change& change) {
      if (change.path == path) forget(change);
      return change.path == path;
    });
    was_there = was_there && since == 0;
    disk->unsynced.erase(path);
  }
  result == 0 && was_there ? disk->changes.push_back(removal) : forget(removal);
  return result;
}

/// write and pwrite. `put(count)` makes the real call for `count` bytes.
template <class Put>
ssize_t written(int descriptor, size_t bytes, const Put& put) {
  {
    const std::lock_guard lock(mutex);
    const auto path = disk == nullptr ? "" : path_of(descriptor);
    if (is_ours(path)) {
      disk->unsynced.insert(path);
      const bool before = disk->failed;
      if (is_hit()) {
        const int error = disk->error;
        if (error == 0) return put((bytes + 1) / 2);
        if (!before) put(bytes / 2);
        errno = error;
        return -1;
      }
    }
  }
  return put(bytes);
}

/// A copy of the bytes with one bit changed, aligned for O_DIRECT. Null if the file is not to be spoilt.
std::shared_ptr<char> spoilt(int descriptor, const void* data, size_t bytes) {
  const std::lock_guard lock(mutex);
  if (disk == nullptr || disk->spoilt_ending.empty() || bytes == 0) return nullptr;
  const auto path = path_of(descriptor);
  if (!is_ours(path) || !path.ends_with(disk->spoilt_ending)) return nullptr;
  constexpr size_t kAligned = 4096;
  const auto room = (bytes + kAligned - 1) / kAligned * kAligned;
  std::shared_ptr<char> copy(static_cast<char*>(std::aligned_alloc(kAligned, room)), std::free);
  std::memcpy(copy.get(), data, bytes);
  copy.get()[bytes / 2] ^= 1;
  return copy;
}

ssize_t written_at(int descriptor, const void* data, size_t bytes, off64_t offset) {
  const auto changed = spoilt(descriptor, data, bytes);
  if (changed != nullptr) data = changed.get();
  return written(descriptor, bytes,
                 [=](size_t count) { return ::syscall(SYS_pwrite64, descriptor, data, count, offset); });
}

/// fallocate and ftruncate. `call` makes the real call.
template <class Call>
int resized_by(int descriptor, const Call& call) {
  const std::lock_guard lock(mutex);
  const auto path = disk == nullptr ? "" : path_of(descriptor);
  if (is_ours(path)) {
    if (fails()) return -1;
    disk->unsynced.insert(path);
  }
  return static_cast<int>(call());
}

int allocated(int descriptor, int mode, off64_t offset, off64_t bytes) {
  return resized_by(descriptor, [=] { return ::syscall(SYS_fallocate, descriptor, mode, offset, bytes); });
}

int resized(int descriptor, off64_t bytes) {
  return resized_by(descriptor, [=] { return ::syscall(SYS_ftruncate, descriptor, bytes); });
}

/// True if listing the folder must fail. Counts listings that reach their `end`.
bool listing_fails(DIR* listed, bool end) {
  const std::lock_guard lock(mutex);
  if (disk == nullptr || disk->listings_left < 0 || path_of(::dirfd(listed)) != disk->folder) return false;
  if (end && disk->listings_left > 0) --disk->listings_left;
  if (end || disk->listings_left > 0) return false;
  disk->failed = true;
  return true;
}

/// A failing close still closes the descriptor, as on Linux.
int closed(int descriptor) {
  const std::lock_guard lock(mutex);
  const auto flags = disk == nullptr ? O_RDONLY : ::fcntl(descriptor, F_GETFL);
  const bool writes = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
  const bool failed = writes && is_ours(path_of(descriptor)) && fails();
  const int error = errno;
  const auto result = static_cast<int>(::syscall(SYS_close, descriptor));
  if (!failed) return result;
  errno = error;
  return -1;
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return opened(path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return opened(path, flags, mode);
}

ssize_t write(int descriptor, const void* data, size_t bytes) {
  const auto changed = spoilt(descriptor, data, bytes);
  if (changed != nullptr) data = changed.get();
  return written(descriptor, bytes, [=](size_t count) { return ::syscall(SYS_write, descriptor, data, count); });
}

ssize_t pwrite(int descriptor, const void* data, size_t bytes, off_t offset) {
  return written_at(descriptor, data, bytes, offset);
}
ssize_t pwrite64(int descriptor, const void* data, size_t bytes, off64_t offset) {
  return written_at(descriptor, data, bytes, offset);
}

ssize_t pread(int descriptor, void* into, size_t bytes, off_t offset) {
  return read_from(descriptor, into, bytes, offset);
}
ssize_t pread64(int descriptor, void* into, size_t bytes, off64_t offset) {
  return read_from(descriptor, into, bytes, offset);
}

int stat(const char* path, struct stat* status) noexcept {
  if (status_fails(path)) return -1;
  return static_cast<int>(::syscall(SYS_newfstatat, AT_FDCWD, path, status, 0));
}
int stat64(const char* path, struct stat64* status) noexcept {
  if (status_fails(path)) return -1;
  return static_cast<int>(::syscall(SYS_newfstatat, AT_FDCWD, path, status, 0));
}

int fallocate(int descriptor, int mode, off_t offset, off_t bytes) {
  return allocated(descriptor, mode, offset, bytes);
}
int fallocate64(int descriptor, int mode, off64_t offset, off64_t bytes) {
  return allocated(descriptor, mode, offset, bytes);
}

int ftruncate(int descriptor, off_t bytes) noexcept { return resized(descriptor, bytes); }
int ftruncate64(int descriptor, off64_t bytes) noexcept { return resized(descriptor, bytes); }

dirent* readdir(DIR* folder) {
  static const auto real = reinterpret_cast<dirent* (*)(DIR*)>(::dlsym(RTLD_NEXT, "readdir"));
  if (listing_fails(folder, /*end=*/false)) {
    errno = EIO;
    return nullptr;
  }
  dirent* entry = real(folder);
  if (entry == nullptr) listing_fails(folder, /*end=*/true);
  return entry;
}

int close(int descriptor) { return closed(descriptor); }

int fsync(int descriptor) {
  const std::lock_guard lock(mutex);
  const auto path = disk == nullptr ? "" : path_of(descriptor);
  if (!is_ours(path)) return static_cast<int>(::syscall(SYS_fsync, descriptor));
  if (fails()) return -1;
  disk->unsynced.erase(path);  // recorded only: a real fsync would take too long
  std::erase_if(disk->changes, [&](const Change& change) {
    if (parent_of(change.path) != path) return false;
    forget(change);
    return true;
  });
  return 0;
}

int rename(const char* from, const char* to) noexcept { return renamed(from, to, 0); }

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  return renamed(path_at(from_folder, from).c_str(), path_at(to_folder, to).c_str(), flags);
}

int mkdir(const char* path, mode_t mode) noexcept {
  const std::lock_guard lock(mutex);
  const bool ours = is_ours(path) && ::syscall(SYS_faccessat, AT_FDCWD, path, F_OK) != 0;
  if (ours && fails()) return -1;
  const auto result = static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
  if (ours && result == 0) disk->changes.push_back({Change::Kind::kCreated, path});
  return result;
}

int unlinkat(int folder, const char* name, int flags) noexcept { return removed(folder, name, flags); }
int unlink(const char* path) noexcept { return removed(AT_FDCWD, path, 0); }
int rmdir(const char* path) noexcept { return removed(AT_FDCWD, path, AT_REMOVEDIR); }

}  // extern "C"

namespace megashard::testing {

FailingDisk::FailingDisk(const std::string& folder) {
  const std::lock_guard lock(mutex);
  disk = new Disk;
  disk->folder = folder;
}

FailingDisk::~FailingDisk() {
  const std::lock_guard lock(mutex);
  for (const auto& change : disk->changes) forget(change);
  delete disk;
  disk = nullptr;
}

void FailingDisk::fail_after(int64_t calls, int error, bool and_all_later) {
  const std::lock_guard lock(mutex);
  disk->calls_left = calls;
  disk->error = error;
  disk->all_later = and_all_later;
  disk->failed = false;
}

bool FailingDisk::has_failed() const {
  const std::lock_guard lock(mutex);
  return disk->failed;
}

void FailingDisk::fail_listing_after(int times) {
  const std::lock_guard lock(mutex);
  disk->listings_left = times;
  disk->failed = false;
}

void FailingDisk::recover() {
  const std::lock_guard lock(mutex);
  disk->listings_left = -1;
  disk->calls_left = -1;
  disk->spoilt_ending.clear();
}

void FailingDisk::spoil_writes(const std::string& ending) {
  const std::lock_guard lock(mutex);
  disk->spoilt_ending = ending;
}

void FailingDisk::fail_reading(const std::string& ending, Reading call, int error) {
  const std::lock_guard lock(mutex);
  disk->unreadable_ending = ending;
  disk->failing_call = call;
  disk->read_error = error;
}

void FailingDisk::refuse_exchange() {
  const std::lock_guard lock(mutex);
  disk->no_exchange = true;
}

void FailingDisk::lose_power(Loss loss) {
  const std::lock_guard lock(mutex);
  for (const auto& path : disk->unsynced) ::truncate(path.c_str(), 0);
  disk->unsynced.clear();
  while (!disk->changes.empty()) {
    const auto change = disk->changes.back();
    disk->changes.pop_back();
    const bool is_removal = change.kind == Change::Kind::kRemoved;
    if (is_removal != (loss == Loss::kRemovals)) {
      forget(change);
      continue;
    }
    if (is_removal) {
      if (::syscall(SYS_faccessat, AT_FDCWD, change.path.c_str(), F_OK) != 0) rename_now(change.kept, change.path, 0);
      forget(change);  // if its folder is gone, too
      continue;
    }
    if (change.kind == Change::Kind::kCreated) {
      if (::syscall(SYS_unlinkat, AT_FDCWD, change.path.c_str(), 0) != 0)
        ::syscall(SYS_unlinkat, AT_FDCWD, change.path.c_str(), AT_REMOVEDIR);
      continue;
    }
    const bool exchanged = change.kind == Change::Kind::kExchanged;
    rename_now(change.path, change.from, exchanged ? 2U : 0U);
    exchanged ? exchange_notes(change.path, change.from) : move_notes(change.path, change.from);
    if (!change.kept.empty()) rename_now(change.kept, change.path, 0);
  }
}

}  // namespace megashard::testing
