#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <string>

#include "parallel/collectives/gloo_process_group.h"

namespace megashard {

/// Connects all members of `group` to each other through keys of `store` that belong to this group only; `address` as
/// in GlooGroupOptions. Failed connections are retried (under load one is sometimes closed while it is made): all
/// members drop the attempt and start another with new keys, at most three in total. Collective. Throws after the last
/// attempt, at the group's deadline, or what `look` throws; it is called repeatedly to check that the members live
/// (null: no check). A member without memory ends the others at once with its own message. Include in .cpp files only.
c10::intrusive_ptr<c10d::ProcessGroupGloo> connect_gloo(const ProcessGroup& group,
                                                        const c10::intrusive_ptr<c10d::Store>& store,
                                                        const std::string& address, const std::function<void()>& look);

}  // namespace megashard
