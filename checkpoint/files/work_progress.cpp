#include "checkpoint/files/work_progress.h"

#include <utility>

namespace megashard {
namespace {

thread_local const WorkWatcher* watcher_of_thread = nullptr;  // null: none, or an outer operation is being reported

}  // namespace

WorkWatch::WorkWatch(WorkWatcher watcher)
    : watcher_(std::move(watcher)), outer_(std::exchange(watcher_of_thread, &watcher_)) {}

WorkWatch::~WorkWatch() { watcher_of_thread = outer_; }

LongWork::LongWork(const char* name, int64_t total, const char* unit)
    : watcher_(std::exchange(watcher_of_thread, nullptr)), name_(name), unit_(unit), total_(total) {
  add(0);
}

LongWork::~LongWork() {
  if (watcher_ == nullptr) return;
  tell(0, /*has_ended=*/true);
  watcher_of_thread = watcher_;
}

void LongWork::tell(int64_t amount, bool has_ended) {
  const auto done = done_.fetch_add(amount) + amount;
  (*watcher_)({.name = name_, .done = done, .total = total_, .unit = unit_, .has_ended = has_ended});
}

}  // namespace megashard
