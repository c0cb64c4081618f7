#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <string>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Repeated rendezvous of a group's members through its store, whatever state its collectives are in; each brings a
/// word. One object per member. Include in .cpp files only.
class StoreMeeting {
 public:
  /// `place`: part of the keys, different for each purpose. `occasion`: what the members are about to do, for errors
  /// ("connecting NCCL"). `group` must outlive it.
  StoreMeeting(c10::intrusive_ptr<c10d::Store> store, const ProcessGroup& group, std::string place,
               std::string occasion);

  /// Waits for all members and returns those (as ranks of the group) whose word differs from the first member's. Throws
  /// TimeoutError at the group's deadline and names the missing ones. `look` is called while waiting and may throw;
  /// null: not called.
  std::vector<int> meet(const std::string& word, const std::function<void()>& look = nullptr);
  /// The last word of a member.
  std::string word_of(int member);
  /// meet(), but throws an error with the words if they differ.
  void agree(const std::string& word);

 private:
  std::string key_of(int member) const { return place_ + "/" + std::to_string(member); }
  int64_t round_of(int member);
  std::string missing_ranks();
  std::string differing_members();

  c10::intrusive_ptr<c10d::Store> store_;
  const ProcessGroup& group_;
  std::string place_, occasion_;
  int64_t round_ = 0;  // keys are reused, so that the store does not grow
};

}  // namespace megashard
