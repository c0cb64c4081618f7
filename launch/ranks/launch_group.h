#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "launch/ranks/descriptor.h"

namespace megashard {

/// Processes of this host that form one world, as torchrun would start them.
struct LaunchGroupOptions {
  int processes = 1;
  std::vector<std::string> command;        ///< program and arguments, the same for every rank
  int master_port = 0;                     ///< 0: a free one is chosen
  std::chrono::milliseconds grace{10000};  ///< from SIGTERM to SIGKILL when the group ends after a failure
  std::string root{};                      ///< count_oom_kills()'s
};

/// Starts the group, waits for it, and returns its exit code: 0, or that of the rank that failed
/// first (128 + signal where one ended it). Every process gets RANK, LOCAL_RANK, WORLD_SIZE,
/// LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, unless set, OMP_NUM_THREADS (this host's cores
/// shared out) and GLIBC_TUNABLES (memory in huge pages). SIGINT, SIGTERM, SIGHUP, SIGUSR1 and
/// SIGUSR2 are passed on; a second SIGINT or SIGTERM ends the group like a failure. The first
/// failure ends the others, and what they say on stderr from then on is dropped: the cause is what
/// the user sees. No process outlives the caller.
/// Throws std::runtime_error, one message, when the group cannot start (port in use, no such
/// program).
int run_launch_group(const LaunchGroupOptions& options);

/// A TCP port of the loopback interface that nobody listens on: `wanted`, or any if it is 0. While
/// it is held, the system gives it to nobody who asks for any port; who asks for this one and sets
/// SO_REUSEADDR, as rank 0's store does, gets it.
struct ReservedPort {
  Descriptor held;
  int port;
};
ReservedPort reserve_port(int wanted);

}  // namespace megashard
