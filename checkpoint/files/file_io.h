#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/block_writer.h"

namespace megashard {

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

/// Size and checksum of a written file.
struct WrittenFile {
  std::string name;  ///< name inside its folder
  int64_t bytes = 0;
  uint32_t crc32 = 0;  ///< of the whole file
};

/// Writes a new file sequentially; replaces an existing one. Data is collected in blocks and checksummed. From the
/// second block on, threads write (block_writer.h).
class OutputFile {
 public:
  /// Permissions follow the umask. `expected_bytes` reserves disk space, so that a full disk is detected before
  /// anything is written. The file may become larger or smaller.
  explicit OutputFile(std::string path, int64_t expected_bytes = 0);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t position() const { return position_; }  ///< bytes written so far
  uint32_t crc32() const { return crc32_; }       ///< checksum of these bytes
  /// Returns the CRC-32 of `data` alone.
  uint32_t write(const void* data, int64_t bytes);
  uint32_t write(std::string_view text) { return write(text.data(), static_cast<int64_t>(text.size())); }
  /// Syncs the data to disk (fsync) and closes the file. Without it the content is undefined after a crash.
  WrittenFile sync_and_close();

 private:
  void write_small();
  void write_rest();

  std::string path_;
  int descriptor_ = -1;
  int64_t position_ = 0;
  const int64_t block_bytes_;
  int64_t block_begin_ = 0;  // start of the block being filled, in the file
  uint32_t crc32_ = 0;
  bool has_reserved_ = false;
  BlockWriter::Block block_;
  std::unique_ptr<BlockWriter> writer_;  // null until the second block
};

/// A file that is written as PATH.tmp and removed unless it is published.
class AtomicFile : public OutputFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  /// Syncs and renames the file, durably. Readers see the old content or the complete new content.
  WrittenFile publish();

 private:
  std::string final_path_;
  bool is_published_ = false;
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
/// Writes a small file as an AtomicFile does.
WrittenFile write_file_atomically(const std::string& path, std::string_view content);
/// Content of a small file. Throws if it is larger than `max_bytes`.
std::string read_small_file(const std::string& path, int64_t max_bytes);

}  // namespace megashard
