#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace megashard {

/// What the groups of one world share about their waits in this process.
class GroupWaits {
 public:
  /// `notice` takes a line about each wait that lasts, on the thread that waits; null: nobody is told.
  explicit GroupWaits(std::function<void(const std::string& line)> notice = {}) : notice_(std::move(notice)) {}

  /// Throws the first failure that was noted. A wait that failed leaves messages behind, so no group is of use any
  /// more: whatever else is under way ends at once, not a deadline later.
  void throw_if_failed() const {
    if (!has_failed_) return;
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(failure_);
  }
  void note_failure(std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    if (!has_failed_) failure_ = std::move(failure);
    has_failed_ = true;
  }
  void tell(const std::string& line) const {
    if (notice_) notice_(line);
  }
  /// Of waits that fail by themselves: the same people are told.
  std::shared_ptr<GroupWaits> apart() const { return std::make_shared<GroupWaits>(notice_); }

 private:
  std::function<void(const std::string& line)> notice_;
  std::atomic<bool> has_failed_ = false;
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace megashard
