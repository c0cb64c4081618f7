#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "parallel/collectives/noted_progress.h"

namespace megashard {

/// Progress of a long operation.
struct WorkProgress {
  const char* name = "";  ///< "load"
  int64_t done = 0;
  int64_t total = 0;
  const char* unit = nullptr;  ///< "samples"; null: bytes
  bool has_ended = false;
};

/// Called when an operation begins, from any of its threads when a part is done, and when it ends.
using WorkWatcher = std::function<void(const WorkProgress& progress)>;

/// While it exists, `watcher` receives the progress of long operations that this thread begins. Operations of other
/// threads, such as an asynchronous save, and nested operations are not reported.
class WorkWatch {
 public:
  explicit WorkWatch(WorkWatcher watcher);
  ~WorkWatch();
  WorkWatch(const WorkWatch&) = delete;
  WorkWatch& operator=(const WorkWatch&) = delete;

 private:
  WorkWatcher watcher_;
  const WorkWatcher* outer_;
};

/// A long operation whose progress is reported. Without a watcher it costs nothing.
class LongWork {
 public:
  /// `name` and `unit` must outlive this object; see WorkProgress.
  LongWork(const char* name, int64_t total, const char* unit = nullptr);
  ~LongWork();
  LongWork(const LongWork&) = delete;
  LongWork& operator=(const LongWork&) = delete;

  /// Adds completed work. Callable from any thread. Also tells waiting ranks that this one makes progress
  /// (note_progress).
  void add(int64_t amount) {
    note_progress();
    if (watcher_ != nullptr) tell(amount);
  }

 private:
  void tell(int64_t amount, bool has_ended = false);

  const WorkWatcher* watcher_;  // null: no watcher
  const char* name_;
  const char* unit_;
  int64_t total_;
  std::atomic<int64_t> done_ = 0;
};

}  // namespace megashard
