#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "launch/ranks/descriptor.h"

namespace megashard {

/// A process that runs one rank.
struct RankProcess {
  pid_t pid = 0;
  Descriptor errors;    ///< reads the rank's stderr
  std::string pending;  ///< read from it, not yet shown
  bool running = true;
  bool stopped = false;  ///< by SIGSTOP or its like
};

struct RankProcessOptions {
  int rank = 0;
  std::vector<std::string> command;    ///< program and arguments
  std::vector<std::string> variables;  ///< "NAME=value", in the place of this process's own
  int inherited = -1;                  ///< a descriptor of this process that it keeps
  sigset_t signal_mask{};
};

/// Starts a rank in a process group of its own, so that Ctrl-C reaches this process only. It is
/// killed when this process ends, and says on its stderr when there is no such program. Throws
/// std::runtime_error when no process can be made.
RankProcess start_rank(RankProcessOptions options);

}  // namespace megashard
