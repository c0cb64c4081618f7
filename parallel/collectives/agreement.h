#pragma once

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "parallel/collectives/error_text.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// Runs `work` on every rank and gathers what it returns, in rank order. When it throws anywhere,
/// all ranks throw the first failure, which names its rank: none waits for one that has given up.
/// c10::ValueError and c10::NotImplementedError stay what they are. A null group is a single rank.
/// Works may differ in length by more than the group's deadline, as where ranks write to disks: a rank is given up when
/// it has done nothing for so long (note_progress), or does not answer. `work` calls no collective of the group.
std::vector<std::string> gather_or_throw(const ProcessGroupPtr& group, const std::function<std::string()>& work);

/// The same without a result.
void all_or_throw(const ProcessGroupPtr& group, const std::function<void()>& work);
/// The same, but what `work` throws on this rank is thrown here as it is.
void all_or_rethrow(const ProcessGroupPtr& group, const std::function<void()>& work);

/// In the handler of a failure that all ranks have: returns when each has come here or is gone, so
/// that none ends, and has a launcher end the others, while another still cleans up.
void meet_after_failure(const ProcessGroupPtr& group) noexcept;

inline int rank_in(const ProcessGroupPtr& group) { return group == nullptr ? 0 : group->rank(); }
inline int size_in(const ProcessGroupPtr& group) { return group == nullptr ? 1 : group->size(); }

}  // namespace megashard
