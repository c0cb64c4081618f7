#pragma once

#include <string>

#include "parallel/collectives/start_wait.h"

namespace megashard {

inline constexpr const char* kLoopback = "127.0.0.1";

struct ListeningSocket {
  int descriptor = -1;  ///< -1: failed
  int error = 0;        ///< errno if it failed. EADDRNOTAVAIL: the machine has no such address
};

/// Listens for TCP connections to the numeric address `host` ("10.0.0.1", "::1") only.
ListeningSocket listen_at(const std::string& host, int port);

/// True if the numeric address cannot be reached from other machines.
bool is_loopback_address(const std::string& host);

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
