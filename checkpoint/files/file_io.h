#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/block_writer.h"

namespace megashard {

/// A file open for reading at offsets; threads may share it. All of file_io throws c10::Error with
/// path and reason.
class InputFile {
 public:
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  /// Reads exactly `bytes` at `offset`; a file that ends before is an error.
  void read_at(void* into, int64_t bytes, int64_t offset) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

/// A file as its writer left it.
struct WrittenFile {
  std::string name;  ///< in its folder
  int64_t bytes = 0;
  uint32_t crc32 = 0;  ///< of the whole file
};

/// A new file (an old one of that name is replaced), written from front to back. Data is gathered
/// into blocks and checksummed on the way; beyond the first block, threads write (block_writer.h).
class OutputFile {
 public:
  /// As the umask allows. `expected_bytes` reserves room on the disk, so that a full one is noticed
  /// before anything is written; the file may become larger or smaller.
  explicit OutputFile(std::string path, int64_t expected_bytes = 0);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t position() const { return position_; }  ///< bytes written so far
  uint32_t crc32() const { return crc32_; }       ///< of these bytes
  /// Returns the CRC-32 of the bytes given.
  uint32_t write(const void* data, int64_t bytes);
  uint32_t write(std::string_view text) { return write(text.data(), static_cast<int64_t>(text.size())); }
  /// Data on the disk (fsync), then closed. Without it the file's content is undefined after a
  /// crash.
  WrittenFile sync_and_close();

 private:
  void write_small();
  void write_rest();

  std::string path_;
  int descriptor_ = -1;
  int64_t position_ = 0;
  const int64_t block_bytes_;
  int64_t block_begin_ = 0;  // of the block being filled, in the file
  uint32_t crc32_ = 0;
  bool has_reserved_ = false;
  BlockWriter::Block block_;
  std::unique_ptr<BlockWriter> writer_;  // from the second block on
};

/// A file that is PATH.tmp until it is whole, and is removed unless it becomes so.
class AtomicFile : public OutputFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  /// Synced and renamed, durably: readers see what was there before, or all of the new content.
  WrittenFile publish();

 private:
  std::string final_path_;
  bool is_published_ = false;
};

/// A whole file in memory, paged in as it is touched. Writing to it changes this process's copy
/// alone.
class MappedFile {
 public:
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  char* data() const { return data_; }
  /// Takes these bytes' pages out of memory; they are read again when touched, and what was written
  /// to them is gone.
  void forget(int64_t offset, int64_t bytes);

 private:
  std::string path_;
  int64_t size_ = 0;
  char* data_ = nullptr;
};

/// A file of the folder that names it, as metadata and indices do: not hidden, no way up or
/// elsewhere. The file itself may be a link, as in Hugging Face's cache: it gives away no more than
/// its reader may read anyway.
bool is_plain_file_name(std::string_view name);
bool path_exists(const std::string& path);
bool is_directory(const std::string& path);
/// Its entries' names, in order; of a folder that cannot be listed it throws.
std::vector<std::string> names_in(const std::string& folder);
/// The folder that a path lies in; "." where it has none.
std::string parent_of(const std::string& path);
/// Creates the folder and those above it, as the umask allows, durably; one that is there already
/// is fine.
void make_directories(const std::string& path);
/// `to` holds the new content after this, or what it held before: the folder's entry is synced too.
void rename_durably(const std::string& from, const std::string& to);
/// Entries of the folder are on the disk.
void sync_directory(const std::string& path);
/// The folder with all that is in it, or a file; one that is not there is fine.
void remove_directory(const std::string& path);
/// Writes a small file as an AtomicFile.
WrittenFile write_file_atomically(const std::string& path, std::string_view content);
/// The content of a small file; larger than `max_bytes` is an error.
std::string read_small_file(const std::string& path, int64_t max_bytes);

}  // namespace megashard
