#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "checkpoint/files/file_io.h"

namespace megashard {

/// Gives each of 0, 1, ..., items - 1 to one of the threads; nothing when there are no more.
using NextItem = std::function<std::optional<int64_t>()>;
/// Runs `work` in that many threads, four at most, of which this one is the first, or in as many
/// as the system grants. A failure ends the others after the item that they are at, and the first
/// is thrown when all have ended.
void run_in_threads(int64_t threads, int64_t items,
                    const std::function<void(const NextItem& next)>& work);

/// Reads from files into memory, gathered and then done together by a few threads: a disk with
/// several requests in flight is faster than with one, and so is copying from the page cache.
class ReadQueue {
 public:
  /// Nothing is read yet; file and memory stay until run() has returned.
  void add(const InputFile& file, void* into, int64_t bytes, int64_t offset);
  /// Throws the first failure; what was read by then is undefined. The queue is empty afterwards.
  void run();

 private:
  struct Read {
    const InputFile* file;
    char* into;
    int64_t bytes;
    int64_t offset;
  };
  std::vector<Read> reads_;
};

}  // namespace megashard
