#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace megashard {

class HostMessages;

/// Wait state that all groups of one world share in this process. Ranks are world ranks.
class GroupWaits {
 public:
  /// `notice` gets a line about each long wait, on the waiting thread; null: no notices.
  explicit GroupWaits(std::function<void(const std::string& line)> notice = {}) : notice_(std::move(notice)) {}
  /// Returns a separate failure state with the same `notice`.
  std::shared_ptr<GroupWaits> apart() const { return std::make_shared<GroupWaits>(notice_); }

  /// Throws the first recorded failure. A failed wait leaves messages behind, so that no group is usable any more: all
  /// other waits end at once instead of at the deadline.
  void throw_if_failed() const {
    if (!has_failed_) return;
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(failure_);
  }
  void note_failure(std::exception_ptr failure);
  void tell(const std::string& line) const {
    if (notice_) notice_(line);
  }

  /// Sets the board on which ranks of this machine show whom they wait for: the messages of the first group that has
  /// them, with members `ranks`.
  void set_board(const std::shared_ptr<HostMessages>& board, const std::vector<int>& ranks);
  /// Shows that this process waits for `rank`; -1: for none.
  void show_wait_for(int rank) const;
  /// Follows the waits from `rank` on, as far as the board shows them, to the rank that waits for no other.
  int last_awaited_behind(int rank) const;

 private:
  std::function<void(const std::string& line)> notice_;
  std::atomic<bool> has_failed_ = false;
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
  std::shared_ptr<HostMessages> board_;  // null: no other rank is on this machine
  std::vector<int> ranks_of_board_;
};

}  // namespace megashard
