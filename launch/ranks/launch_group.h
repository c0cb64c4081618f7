#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "launch/ranks/rank_process.h"

namespace megashard {

/// Processes on this host that form one world, as started by torchrun.
struct LaunchGroupOptions {
  int processes = 1;
  std::vector<std::string> command;        ///< program and arguments, the same for every rank
  int master_port = 0;                     ///< 0: selects a free one
  std::chrono::milliseconds grace{10000};  ///< time from SIGTERM to SIGKILL when the group ends after a failure
  std::string root{};                      ///< root of count_oom_kills()
  pid_t parent = 0;                        ///< if not 0, the group ends once this is no longer the parent process
};

/// Starts the group, waits for it, and returns its exit code: 0, or that of the rank that failed first (128 + signal if
/// one ended it). Every process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and,
/// unless set, OMP_NUM_THREADS (an equal share of the host's cores) and GLIBC_TUNABLES (heap in huge pages). SIGINT,
/// SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded; a second SIGINT or SIGTERM ends the group like a failure. The
/// first failure ends the others, and their later stderr is dropped, so that the user sees the cause. No process
/// outlives the caller.
/// Throws std::runtime_error if the group cannot start (port in use, missing program).
int run_launch_group(const LaunchGroupOptions& options);

/// A free TCP port of the loopback interface: `wanted`, or any if it is 0. While it is held, the system does not assign
/// it to others; a socket that binds this port with SO_REUSEADDR, as rank 0's store does, gets it.
struct ReservedPort {
  Descriptor held;
  int port;
};
ReservedPort reserve_port(int wanted);

}  // namespace megashard
