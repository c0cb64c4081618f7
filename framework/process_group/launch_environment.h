#pragma once

#include <optional>
#include <string>

#include "framework/process_group/launcher_variables.h"
#include "parallel/collectives/rendezvous.h"

namespace megashard {

/// This process's rank and group according to its launcher: the fields of `rendezvous` up to agent_store_prefix.
struct LaunchEnvironment {
  RendezvousOptions rendezvous;
  std::string launcher;  ///< name in launcher_variables.h, or "none"
};

/// Reads the variables of the launcher that find_launcher selects. MASTER_ADDR and MASTER_PORT (set by torchrun)
/// override the derived ones (first host of the job, port from the job's id). No variables: one process. Throws
/// OwnUsageError for incomplete or contradicting ones. `local_rank` (--local-rank) replaces an unset LOCAL_RANK, and
/// selects the GPU of one process without a launcher. With RANK and WORLD_SIZE only it is -1 (unknown). Only the init
/// method env:// needs an address.
LaunchEnvironment read_environment(const GetVariable& get, std::optional<int> local_rank = {},
                                   const std::string& init_method = "env://");
/// Reads this process's environment.
LaunchEnvironment read_environment(std::optional<int> local_rank, const std::string& init_method);

/// First host of a Slurm node list: "gpu[003-007,9],login" -> "gpu003". Throws UsageError.
std::string first_slurm_host(const std::string& node_list);

/// Creates the group of all ranks from the launcher's variables (torchrun, megashard launch, Open MPI, MPICH, Slurm;
/// one process without any), as torch.distributed.init_process_group. init_method: "env://", "tcp://HOST:PORT" or
/// "file:///PATH". Uses NCCL and Gloo if this process can use a GPU, else Gloo. Collective. Throws UsageError for
/// missing or contradicting variables.
ProcessGroupPtr init_process_group(const std::string& init_method = "env://");

}  // namespace megashard
