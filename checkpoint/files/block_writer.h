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

/// Writes a file block by block from threads of its own, past the page cache where the file system
/// can (O_DIRECT): the disk is busy while the next block is filled, and the data does not push
/// other things out of memory. Not thread safe itself.
class BlockWriter {
 public:
  static constexpr int64_t kBlockBytes = 8 << 20;
  /// Of large files: the fewer writes, the less whoever computes meanwhile is disturbed.
  static constexpr int64_t kLargeBlockBytes = 32 << 20;
  static constexpr int64_t kSectorBytes = 4096;  ///< O_DIRECT's unit on every disk of today

  struct Release {
    void operator()(char* block) const;
  };
  using Block = std::unique_ptr<char, Release>;  ///< aligned for O_DIRECT
  static Block make_block(int64_t bytes);

  /// The descriptor stays the caller's; `path` is for messages, take() gives `block_bytes`.
  BlockWriter(int descriptor, std::string path, int64_t block_bytes);
  ~BlockWriter();  ///< abandons what is not written yet
  BlockWriter(const BlockWriter&) = delete;
  BlockWriter& operator=(const BlockWriter&) = delete;

  /// Writes the block at `offset`, soon; now where no thread could be had. `bytes` are rounded up to whole sectors, so
  /// the file may end behind them. Throws what an earlier block failed with.
  void submit(Block full, int64_t bytes, int64_t offset);
  /// A block to fill: waits for one to be written when too many are under way.
  Block take();
  /// Waits until all blocks are written; throws what one failed with.
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
  int made_ = 0;     // blocks, the one being filled included
  int writing_ = 0;  // threads at work
  bool closing_ = false;
  std::exception_ptr failure_;
  std::vector<std::thread> threads_;
};

}  // namespace megashard
