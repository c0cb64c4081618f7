#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/work_progress.h"

namespace megashard {

/// Starts up to `count` threads that run `work`: fewer, maybe none, if the system grants no more. If there are none,
/// the caller does the work itself.
std::vector<std::thread> start_threads(int64_t count, const std::function<void()>& work);

/// Returns the next of 0, 1, ..., items - 1, each to one thread; nullopt when all are taken.
using NextItem = std::function<std::optional<int64_t>()>;
/// Runs `work` in `threads` threads including this one, or in as many as the system grants. After a failure the other
/// threads finish their current item; when all have ended, the first failure is thrown.
void run_in_threads(int64_t threads, int64_t items, const std::function<void(const NextItem& next)>& work);

/// Number of file requests in flight beyond which no disk gets faster.
inline constexpr int64_t kMaxReaders = 4;

/// Collects reads from files into memory; run() executes them in a few threads. Several requests in flight are faster
/// than one, for disks and for copies from the page cache.
class ReadQueue {
 public:
  /// Queues a read. `file` and the memory must stay valid until run() has returned.
  void add(const InputFile& file, void* into, int64_t bytes, int64_t offset);
  /// Executes all queued reads, empties the queue and adds the bytes to `work`. Throws the first failure; the memory is
  /// then undefined.
  void run(LongWork* work = nullptr);
  int64_t bytes() const { return bytes_; }  ///< queued bytes

 private:
  struct Read {
    const InputFile* file;
    char* into;
    int64_t bytes;
    int64_t offset;
  };
  std::vector<Read> reads_;
  int64_t bytes_ = 0;
};

}  // namespace megashard
