#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/work_progress.h"

namespace megashard {

/// Reads from files into memory, gathered and then done together by a few threads: a disk with
/// several requests in flight is faster than with one, and so is copying from the page cache.
class ReadQueue {
 public:
  /// Nothing is read yet; file and memory stay until run() has returned.
  void add(const InputFile& file, void* into, int64_t bytes, int64_t offset);
  /// Throws the first failure; what was read by then is undefined. The queue is empty afterwards. The bytes are
  /// added to `work`.
  void run(LongWork* work = nullptr);
  int64_t bytes() const { return bytes_; }  ///< that wait to be read

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
