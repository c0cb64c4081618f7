#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace megashard {

/// A file that exists but cannot be read now, and maybe can later: no permission, a failing disk, a server that does
/// not answer, no memory or descriptors. A missing, truncated or changed file is a plain c10::Error.
class UnreadableError : public c10::Error {
 public:
  using c10::Error::Error;
};

/// Description of errno.
std::string errno_text();
/// Throws UnreadableError, or c10::Error if `error` says that the file does not exist. `message` has path and reason.
[[noreturn]] void throw_read_failure(const std::string& message, int error);
/// True if this errno means that the file does not exist.
bool is_not_there(int error);

/// A file open for reading at offsets. Thread-safe. All functions of file_io throw c10::Error with path and reason.
class InputFile {
 public:
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  /// Reads exactly `bytes` at `offset`. Throws if the file ends before.
  void read_at(void* into, int64_t bytes, int64_t offset) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

/// A whole file mapped privately into memory; pages are loaded on access. Writes change only this process's copy.
class MappedFile {
 public:
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  char* data() const { return data_; }
  /// Releases the pages of these bytes. They are read from the file again on access; changes are lost.
  void forget(int64_t offset, int64_t bytes);

 private:
  std::string path_;
  int64_t size_ = 0;
  char* data_ = nullptr;
};

/// True if `name` is a plain name inside its folder, as metadata and indices may contain: not hidden and without path
/// separators. The file itself may be a symbolic link, as in Hugging Face's cache; it reveals no more than the reader
/// may read anyway.
bool is_plain_file_name(std::string_view name);
bool path_exists(const std::string& path);
bool is_directory(const std::string& path);
/// Names of the entries in sorted order. Throws if the folder cannot be listed.
std::vector<std::string> names_in(const std::string& folder);
/// Parent folder of a path; "." if it has none.
std::string parent_of(const std::string& path);
/// Creates the folder and its parents, durably. Permissions follow the umask. Existing folders are accepted.
void make_directories(const std::string& path);
/// Renames a file or folder and syncs the parent folder. After a crash, `to` holds the old or the new content.
void rename_durably(const std::string& from, const std::string& to);
/// Syncs the entries of the folder to disk.
void sync_directory(const std::string& path);
/// Removes a folder with its contents, or a file. Does nothing if the path does not exist.
void remove_directory(const std::string& path);
/// Content of a small file. Throws if it is larger than `max_bytes`.
std::string read_small_file(const std::string& path, int64_t max_bytes);

}  // namespace megashard
