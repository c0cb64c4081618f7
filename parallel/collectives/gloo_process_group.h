#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "parallel/collectives/group_waits.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

struct GroupStore;
using GroupStorePtr = std::shared_ptr<GroupStore>;

/// For ranks that are threads of this process.
GroupStorePtr make_in_process_store();

struct GlooGroupOptions {
  GroupStorePtr store{};
  int rank = 0;
  std::vector<int> ranks{};  ///< members as ranks of the world
  std::string name = "world";
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Of this machine, where Gloo listens. Empty: what c10d takes, GLOO_SOCKET_IFNAME's or the host name's.
  std::string address = "127.0.0.1";
  /// Shared with all subgroups. Null: the group makes one, which tells nobody.
  std::shared_ptr<GroupWaits> waits{};
};

/// Collectives on CPU tensors over Gloo's point-to-point messages, which move bytes between tensors
/// without a copy of ours: faster by three than c10d's own all-gather and reduce-scatter on Gloo,
/// which clone (docs/process_groups.md). Collective: returns when all members are connected, or
/// throws one error at the deadline.
ProcessGroupPtr make_gloo_group(const GlooGroupOptions& options);

/// A group of all ranks of `group`, which is one of the above or of their subgroups, for another thread: a failure in
/// one of the two groups is none in the other. Collective.
ProcessGroupPtr make_group_apart(const ProcessGroupPtr& group, const std::string& name);

}  // namespace megashard
