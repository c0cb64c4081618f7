#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <string>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Where members of a group come together, time after time, whatever their collectives do: at its store, each with a
/// word. One object on each member. Included by .cpp files only.
class StoreMeeting {
 public:
  /// `place`: part of the keys, another one for each purpose. `occasion`: what the members are about to do, for errors
  /// ("connecting NCCL"). `group` must outlive it.
  StoreMeeting(c10::intrusive_ptr<c10d::Store> store, const ProcessGroup& group, std::string place,
               std::string occasion);

  /// Waits for all members; returns those (as ranks of the group) whose word is not the first one's. Throws
  /// TimeoutError, which names those who did not come by the group's deadline. `look` is called while it waits, and may
  /// throw; null: nothing is looked at.
  std::vector<int> meet(const std::string& word, const std::function<void()>& look = nullptr);
  /// The word that a member came with last.
  std::string word_of(int member);
  /// The same; throws one error with the words where they differ.
  void agree(const std::string& word);

 private:
  std::string key_of(int member) const { return place_ + "/" + std::to_string(member); }
  int64_t round_of(int member);
  std::string missing_ranks();
  std::string differing_members();

  c10::intrusive_ptr<c10d::Store> store_;
  const ProcessGroup& group_;
  std::string place_, occasion_;
  int64_t round_ = 0;  // keys are used again, so that a store does not grow
};

}  // namespace megashard
