#pragma once

#include <functional>
#include <optional>
#include <string>

#include "parallel/collectives/rendezvous.h"

namespace megashard {

/// Value of an environment variable; nullopt when it is not set.
using GetVariable = std::function<std::optional<std::string>(const std::string& name)>;

/// Which process of a group this is, as its launcher says: the fields of `rendezvous` up to
/// agent_store_prefix.
struct LaunchEnvironment {
  RendezvousOptions rendezvous;
  std::string launcher;  ///< "environment" (torchrun, megashard launch), "Open MPI", "MPICH",
                         ///< "Slurm", "none"
};

/// Reads the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), else
/// of Open MPI, MPICH (PMI) or Slurm, in this order: a launcher that runs inside another's
/// allocation sees the outer variables too. MASTER_ADDR and MASTER_PORT win over what the others
/// derive (first host of the job, port from the job's id). No variables at all: one process. Throws
/// OwnUsageError, one sentence, for partial or contradicting ones. `local_rank` (--local-rank) is
/// LOCAL_RANK where that is not set, and the GPU of one process without a launcher.
LaunchEnvironment read_environment(const GetVariable& get, std::optional<int> local_rank = {});
LaunchEnvironment read_environment(std::optional<int> local_rank);  ///< of this process

/// First host of a Slurm node list: "gpu[003-007,9],login" -> "gpu003". Throws
/// UsageError.
std::string first_slurm_host(const std::string& node_list);

}  // namespace megashard
