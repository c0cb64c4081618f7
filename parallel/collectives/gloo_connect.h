#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <string>

#include "parallel/collectives/gloo_process_group.h"

namespace megashard {

/// Connects every member of `group` with every other, through keys of `store` that are this group's alone; `address`:
/// GlooGroupOptions'. A connection that fails (under load, one is closed now and then while it is made) is not the end:
/// all members drop the attempt and make another with fresh keys, at most three. Collective; throws one error after the
/// last, at the group's deadline, or what `look` throws, which is called now and then to see whether the members live
/// (null: nobody knows). Included by .cpp files only.
c10::intrusive_ptr<c10d::ProcessGroupGloo> connect_gloo(const ProcessGroup& group,
                                                        const c10::intrusive_ptr<c10d::Store>& store,
                                                        const std::string& address, const std::function<void()>& look);

}  // namespace megashard
