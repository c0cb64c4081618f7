#include "checkpoint/files/file_io.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "checkpoint/files/mapped_ranges.h"
#include "parallel/collectives/noted_progress.h"

namespace megashard {
namespace {

constexpr int64_t kMaxPerCall = 1 << 30;  // Linux moves at most 2 GiB - 4 KiB a call

int open_to_read(const std::string& path, int64_t& size) {
  // O_NONBLOCK: a named pipe would make open() wait for a writer.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) throw_read_failure("cannot read " + path + ": " + errno_text(), errno);
  struct stat status {};
  const int error = ::fstat(descriptor, &status) == 0 ? 0 : errno;
  const bool regular = error == 0 && S_ISREG(status.st_mode);
  if (!regular) ::close(descriptor);
  if (error != 0) throw_read_failure("cannot read " + path + ": " + std::strerror(error), error);
  TORCH_CHECK(regular, "cannot read ", path, ": it is not a regular file");
  size = status.st_size;
  return descriptor;
}

/// False if the path does not exist.
bool find_status(const std::string& path, struct stat& status) {
  if (::stat(path.c_str(), &status) == 0) return true;
  const int error = errno;
  if (!is_not_there(error)) throw_read_failure("cannot read " + path + ": " + std::strerror(error), error);
  return false;
}

}  // namespace

std::string errno_text() { return std::strerror(errno); }

bool is_not_there(int error) { return error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENAMETOOLONG; }

void throw_read_failure(const std::string& message, int error) {
  TORCH_CHECK(!is_not_there(error), message);
  throw UnreadableError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

InputFile::InputFile(std::string path) : path_(std::move(path)) { descriptor_ = open_to_read(path_, size_); }

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_) {}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void InputFile::read_at(void* into, int64_t bytes, int64_t offset) const {
  TORCH_CHECK(bytes >= 0 && offset >= 0 && offset <= size_ && bytes <= size_ - offset, path_, " has ", size_,
              " bytes, but bytes ", offset, " to ", offset, " + ", bytes,
              " are needed: the file is truncated or belongs to another checkpoint");
  auto* target = static_cast<char*>(into);
  while (bytes > 0) {
    const auto got = ::pread(descriptor_, target, std::min(bytes, kMaxPerCall), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw_read_failure("reading " + path_ + " at byte " + std::to_string(offset) + " failed: " + errno_text(), errno);
    }
    TORCH_CHECK(got > 0, path_, " ends at byte ", offset, ": it was cut while it was read");
    target += got;
    offset += got;
    bytes -= got;
    note_progress();
  }
}

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const int descriptor = open_to_read(path_, size_);
  void* mapped = nullptr;
  if (size_ > 0) {
    mapped =
        ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
  }
  const auto why = errno_text();
  ::close(descriptor);
  TORCH_CHECK(mapped != MAP_FAILED, "cannot map ", path_, " into memory: ", why);
  data_ = static_cast<char*>(mapped);
  if (data_ != nullptr) note_mapped_range(path_.c_str(), data_, size_);
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  forget_mapped_range(data_);
  ::munmap(data_, static_cast<size_t>(size_));
}

void MappedFile::forget(int64_t offset, int64_t bytes) {
  static const int64_t page = ::sysconf(_SC_PAGESIZE);
  const auto begin = (offset + page - 1) / page * page;  // whole pages only: neighbours keep theirs
  const auto end = (offset + bytes) / page * page;
  if (begin < end) ::madvise(data_ + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
}

bool path_exists(const std::string& path) {
  struct stat status {};
  return find_status(path, status);
}

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name[0] != '.' && name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

bool is_directory(const std::string& path) {
  struct stat status {};
  return find_status(path, status) && S_ISDIR(status.st_mode);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename().string());
  if (error) throw_read_failure("cannot list " + folder + ": " + error.message(), error.value());
  std::sort(names.begin(), names.end());
  return names;
}

std::string parent_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

void make_directories(const std::string& path) {
  TORCH_CHECK_VALUE(!path.empty(), "cannot create a folder with an empty name");
  for (size_t end = path.find('/', 1); !path.empty(); end = path.find('/', end + 1)) {
    const auto part = path.substr(0, end);
    const bool made = ::mkdir(part.c_str(), 0777) == 0;
    const auto why = errno_text();
    TORCH_CHECK(made || is_directory(part), "cannot create the folder ", part, ": ", why);
    if (made) sync_directory(parent_of(part));
    if (end == std::string::npos) break;
  }
}

void sync_directory(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TORCH_CHECK(descriptor >= 0, "cannot open the folder ", path, ": ", errno_text());
  const bool synced = ::fsync(descriptor) == 0 || errno == EINVAL;  // EINVAL: not needed on this file system
  const auto why = errno_text();
  ::close(descriptor);
  TORCH_CHECK(synced, "fsync of the folder ", path, " failed: ", why);
}

void rename_durably(const std::string& from, const std::string& to) {
  TORCH_CHECK(::rename(from.c_str(), to.c_str()) == 0, "cannot rename ", from, " to ", to, ": ", errno_text());
  sync_directory(parent_of(to));
}

void remove_directory(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  TORCH_CHECK(!error, "cannot remove ", path, ": ", error.message());
  note_progress();
}

std::string read_small_file(const std::string& path, int64_t max_bytes) {
  const InputFile file(path);
  TORCH_CHECK(file.size() <= max_bytes, path, " has ", file.size(), " bytes; at most ", max_bytes,
              " are expected here");
  std::string content(static_cast<size_t>(file.size()), '\0');
  file.read_at(content.data(), file.size(), 0);
  return content;
}

}  // namespace megashard
