#pragma once

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "parallel/collectives/process_group.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

/// Runs `work` on every rank and gathers the results in rank order. If it throws on any rank, all ranks throw the first
/// failure, which names its rank, so that none waits for a rank that gave up. c10::ValueError and
/// c10::NotImplementedError keep their type. A null group is a single rank. Durations may differ between ranks by more
/// than the group's deadline, e.g. when ranks write to disks: a rank is given up only if it reports no progress
/// (note_progress) for that long or does not answer. `work` must not call collectives of the group. Collective.
std::vector<std::string> gather_or_throw(const ProcessGroupPtr& group, const std::function<std::string()>& work);

/// gather_or_throw without a result.
void all_or_throw(const ProcessGroupPtr& group, const std::function<void()>& work);
/// all_or_throw, but rethrows this rank's own exception unchanged.
void all_or_rethrow(const ProcessGroupPtr& group, const std::function<void()>& work);

/// For the handler of a failure that all ranks have: returns when each rank has called it or is gone, so that no rank
/// exits, and makes a launcher kill the others, while another one still cleans up.
void meet_after_failure(const ProcessGroupPtr& group) noexcept;

inline int rank_in(const ProcessGroupPtr& group) { return group == nullptr ? 0 : group->rank(); }
inline int size_in(const ProcessGroupPtr& group) { return group == nullptr ? 1 : group->size(); }

}  // namespace megashard
