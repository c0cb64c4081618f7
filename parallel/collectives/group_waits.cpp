#include "parallel/collectives/group_waits.h"

#include <algorithm>

#include "parallel/collectives/host_messages.h"

namespace megashard {

void GroupWaits::note_failure(std::exception_ptr failure) {
  const std::lock_guard lock(mutex_);
  if (!has_failed_) failure_ = std::move(failure);
  has_failed_ = true;
}

void GroupWaits::set_board(const std::shared_ptr<HostMessages>& board, const std::vector<int>& ranks) {
  if (board_ != nullptr) return;
  board_ = board;
  ranks_of_board_ = ranks;
}

void GroupWaits::show_wait_for(int rank) const {
  if (board_ != nullptr) board_->show_wait_for(rank);
}

int GroupWaits::last_awaited_behind(int rank) const {
  for (size_t steps = 0; steps < ranks_of_board_.size(); ++steps) {  // ranks may wait in a cycle
    const auto place = std::ranges::find(ranks_of_board_, rank);
    const int peer = static_cast<int>(place - ranks_of_board_.begin());
    const int next = place == ranks_of_board_.end() ? -1 : board_->awaited_by(peer);
    if (next < 0) break;
    rank = next;
  }
  return rank;
}

}  // namespace megashard
