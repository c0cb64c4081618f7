#pragma once

#include <string>

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

}  // namespace megashard
