#pragma once

#include <string>

#include "parallel/collectives/start_wait.h"

namespace megashard {

/// Result of one attempt to reach an address.
struct AddressProbe {
  std::string reached{};  ///< numeric host ("10.0.0.1"); empty: not reached
  std::string own{};      ///< this machine's address on that route; empty: loopback, which other machines cannot reach
  std::string why{};      ///< reason if not reached: "nobody listens there"; empty: the name service gave no answer
  std::string remedy{};   ///< "start rank 0"
};

/// Resolves `host` and, if `connects`, opens and closes a connection to `port`. Ends by the deadline, and a single
/// connection attempt within a few seconds.
AddressProbe probe_address(const std::string& host, int port, bool connects, const StartDeadline& deadline);

}  // namespace megashard
