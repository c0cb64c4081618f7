#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace megashard {

/// Writes a file block by block in its own threads, bypassing the page cache if the file system supports O_DIRECT. The
/// disk is busy while the next block is filled, and no cached data is evicted. Not thread-safe.
class BlockWriter {
 public:
  static constexpr int64_t kBlockBytes = 8 << 20;
  /// Block size for large files: fewer writes disturb concurrent computation less.
  static constexpr int64_t kLargeBlockBytes = 32 << 20;
  static constexpr int64_t kSectorBytes = 4096;  ///< unit of O_DIRECT on current disks

  struct Release {
    void operator()(char* block) const;
  };
  using Block = std::unique_ptr<char, Release>;  ///< aligned for O_DIRECT
  static Block make_block(int64_t bytes);

  /// Does not own `descriptor`. `path` is used in messages; take() returns blocks of `block_bytes`.
  BlockWriter(int descriptor, std::string path, int64_t block_bytes);
  ~BlockWriter();  ///< discards blocks that are not written yet
  BlockWriter(const BlockWriter&) = delete;
  BlockWriter& operator=(const BlockWriter&) = delete;

  /// Queues the block for writing at `offset`; writes it at once if no thread could be started. `bytes` are rounded up
  /// to whole sectors, so the file may become longer. Throws the error of an earlier block.
  void submit(Block full, int64_t bytes, int64_t offset);
  /// Returns a block to fill. Blocks if too many are being written.
  Block take();
  /// Waits until all blocks are written. Throws the first error.
  void drain();

 private:
  struct Job {
    Block block;
    int64_t bytes;
    int64_t offset;
  };
  void work();
  void take_job(std::unique_lock<std::mutex>& lock);
  void write(const char* from, int64_t bytes, int64_t offset);
  void leave_page_cache_alone(bool alone);
  void rethrow() const;

  int descriptor_;
  std::string path_;
  int64_t block_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  std::vector<Block> free_;
  int made_ = 0;     // allocated blocks, including the one being filled
  int writing_ = 0;  // threads that are writing
  bool closing_ = false;
  std::exception_ptr failure_;
  std::vector<std::thread> threads_;
};

/// Size and checksum of a written file.
struct WrittenFile {
  std::string name;  ///< name inside its folder
  int64_t bytes = 0;
  uint32_t crc32 = 0;  ///< checksum of all bytes
};

/// Writes a new file sequentially; replaces an existing one. Data is collected in blocks and checksummed. From the
/// second block on, threads write (BlockWriter).
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

/// Writes a small file as an AtomicFile does.
WrittenFile write_file_atomically(const std::string& path, std::string_view content);

}  // namespace megashard
