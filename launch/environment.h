#pragma once

#include <functional>
#include <optional>
#include <string>

namespace megashard {

/// Value of an environment variable; nullopt when it is not set.
using GetVariable = std::function<std::optional<std::string>(const std::string& name)>;

/// Which process of a group this is, as its launcher says.
struct LaunchEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        ///< among the ranks of this host
  int local_world_size = 1;  ///< ranks of this host; 0: the launcher does not say
  std::string master_addr = "127.0.0.1";
  int master_port = 29500;
  std::string launcher =
      "none";  ///< "environment" (torchrun, megashard launch), "Open MPI", "MPICH", "Slurm", "none"

  std::string url() const;  ///< tcp://ADDR:PORT of rank 0's store
};

/// Reads the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), else
/// of Open MPI, MPICH (PMI) or Slurm, in this order: a launcher that runs inside another's
/// allocation sees the outer variables too. MASTER_ADDR and MASTER_PORT win over what the others
/// derive (first host of the job, port from the job's id). No variables at all: one process. Throws
/// UsageError, one sentence, for partial or contradicting ones.
LaunchEnvironment read_environment(const GetVariable& get);
LaunchEnvironment read_environment();  ///< of this process

/// First host of a Slurm node list: "gpu[003-007,9],login" -> "gpu003". Throws
/// UsageError.
std::string first_slurm_host(const std::string& node_list);

}  // namespace megashard
