#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "parallel/collectives/noted_progress.h"

namespace megashard {

/// How far a long work is.
struct WorkProgress {
  const char* name = "";  ///< "load"
  int64_t done = 0;
  int64_t total = 0;
  const char* unit = nullptr;  ///< "samples"; null: bytes
  bool has_ended = false;
};

/// Called when a work begins, each time that a part of it is done, from any thread that works on it, and at its end.
using WorkWatcher = std::function<void(const WorkProgress& progress)>;

/// While it lives, its watcher hears of the long works that this thread begins. Those of other threads, such as a save
/// beside training, are not told, nor those within another one.
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

/// A work that may take long. Where nobody watches it costs nothing.
class LongWork {
 public:
  /// `name` and `unit` stay as they are; see WorkProgress.
  LongWork(const char* name, int64_t total, const char* unit = nullptr);
  ~LongWork();
  LongWork(const LongWork&) = delete;
  LongWork& operator=(const LongWork&) = delete;

  /// So much more is done. From any thread. Other ranks, which wait for this one, hear of it, too (note_progress).
  void add(int64_t amount) {
    note_progress();
    if (watcher_ != nullptr) tell(amount);
  }

 private:
  void tell(int64_t amount, bool has_ended = false);

  const WorkWatcher* watcher_;  // null: nobody
  const char* name_;
  const char* unit_;
  int64_t total_;
  std::atomic<int64_t> done_ = 0;
};

}  // namespace megashard
