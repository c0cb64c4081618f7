#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/work_progress.h"

namespace megashard {

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
