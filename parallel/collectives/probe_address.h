#pragma once

#include <string>

#include "parallel/collectives/start_wait.h"

namespace megashard {

/// What became of one attempt to reach an address.
struct AddressProbe {
  std::string reached{};  ///< numeric host ("10.0.0.1"); empty: none yet
  std::string own{};      ///< this machine's on the way there; empty: the loopback one, which nobody else reaches
  std::string why{};      ///< where none is reached: "nobody listens there"; empty: the name service gave no answer
  std::string remedy{};   ///< "start rank 0"
};

/// Looks `host` up and, if `connects`, opens and closes a connection to `port`; waits no longer
/// than the deadline, and for one connection no longer than a few seconds.
AddressProbe probe_address(const std::string& host, int port, bool connects, const StartDeadline& deadline);

}  // namespace megashard
