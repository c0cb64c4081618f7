#pragma once

#include <optional>
#include <string>

#include "framework/process_group/launcher_variables.h"
#include "parallel/collectives/rendezvous.h"

namespace megashard {

/// Which process of a group this is, as its launcher says: the fields of `rendezvous` up to
/// agent_store_prefix.
struct LaunchEnvironment {
  RendezvousOptions rendezvous;
  std::string launcher;  ///< of launcher_variables.h, or "none"
};

/// Reads the variables of the launcher that find_launcher names. MASTER_ADDR and MASTER_PORT, which
/// torchrun sets, win over what the others derive (first host of the job, port from the job's id).
/// No variables at all: one process. Throws OwnUsageError, one message, for partial or
/// contradicting ones. `local_rank` (--local-rank) is LOCAL_RANK where that is not set, and the GPU
/// of one process without a launcher. RANK and WORLD_SIZE alone leave it open: -1. Only the init method env:// asks
/// for an address.
LaunchEnvironment read_environment(const GetVariable& get, std::optional<int> local_rank = {},
                                   const std::string& init_method = "env://");
/// Of this process.
LaunchEnvironment read_environment(std::optional<int> local_rank, const std::string& init_method);

/// First host of a Slurm node list: "gpu[003-007,9],login" -> "gpu003". Throws
/// UsageError.
std::string first_slurm_host(const std::string& node_list);

}  // namespace megashard
