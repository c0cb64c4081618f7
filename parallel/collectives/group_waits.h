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

/// What the groups of one world share about their waits in this process. Ranks are those of the world.
class GroupWaits {
 public:
  /// `notice` takes a line about each wait that lasts, on the thread that waits; null: nobody is told.
  explicit GroupWaits(std::function<void(const std::string& line)> notice = {}) : notice_(std::move(notice)) {}
  /// Of waits that fail by themselves: the same people are told.
  std::shared_ptr<GroupWaits> apart() const { return std::make_shared<GroupWaits>(notice_); }

  /// Throws the first failure that was noted. A wait that failed leaves messages behind, so no group is of use any
  /// more: whatever else is under way ends at once, not a deadline later.
  void throw_if_failed() const {
    if (!has_failed_) return;
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(failure_);
  }
  void note_failure(std::exception_ptr failure);
  void tell(const std::string& line) const {
    if (notice_) notice_(line);
  }

  /// Where the ranks on this machine show each other for whom they wait: the messages of the first group that has any,
  /// whose members are `ranks`.
  void set_board(const std::shared_ptr<HostMessages>& board, const std::vector<int>& ranks);
  /// Shows that this process waits for a rank; -1: for none.
  void show_wait_for(int rank) const;
  /// Who waits for nobody behind that rank, as far as the board tells: the one that the others wait for, in the end.
  int last_awaited_behind(int rank) const;

 private:
  std::function<void(const std::string& line)> notice_;
  std::atomic<bool> has_failed_ = false;
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
  std::shared_ptr<HostMessages> board_;  // null: no rank is on this machine
  std::vector<int> ranks_of_board_;
};

}  // namespace megashard
