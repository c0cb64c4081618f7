#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "launch/ranks/descriptor.h"

namespace megashard {

/// A process that runs a rank.
struct RankProcess {
  pid_t pid = 0;
  Descriptor errors;    ///< reads the rank's stderr
  std::string pending;  ///< read, but not shown yet
  bool running = true;
  bool stopped = false;  ///< by SIGSTOP or similar
};

struct RankProcessOptions {
  int rank = 0;
  std::vector<std::string> command;    ///< program and arguments
  std::vector<std::string> variables;  ///< "NAME=value", replacing this process's variables
  int inherited = -1;                  ///< a descriptor that the rank keeps open
  sigset_t signal_mask{};
};

/// Starts a rank in its own process group, so that only this process receives Ctrl-C. The rank is killed when this
/// process ends, and reports a missing program on its stderr. Throws std::runtime_error if no process can be created.
RankProcess start_rank(RankProcessOptions options);

}  // namespace megashard
