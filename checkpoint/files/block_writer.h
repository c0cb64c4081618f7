#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
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

}  // namespace megashard
