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

/// Store for ranks that are threads of this process.
GroupStorePtr make_in_process_store();

struct GlooGroupOptions {
  GroupStorePtr store{};
  int rank = 0;
  std::vector<int> ranks{};  ///< members as world ranks
  std::string name = "world";
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Local address on which Gloo listens. Empty: c10d's choice, from GLOO_SOCKET_IFNAME or the host name.
  std::string address = "127.0.0.1";
  /// Shared with all subgroups. Null: the group creates one without notices.
  std::shared_ptr<GroupWaits> waits{};
};

/// Collectives on CPU tensors over Gloo's point-to-point messages, which move bytes between tensors without extra
/// copies: three times as fast as c10d's own all-gather and reduce-scatter on Gloo, which clone
/// (docs/process_groups.md). Collective: returns when all members are connected; throws at the deadline.
ProcessGroupPtr make_gloo_group(const GlooGroupOptions& options);

/// A second group of all ranks of `group` (a group made above, or a subgroup) for another thread. A failure in one of
/// the two groups does not affect the other. Collective.
ProcessGroupPtr make_group_apart(const ProcessGroupPtr& group, const std::string& name);

}  // namespace megashard
