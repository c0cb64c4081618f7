#pragma once

#include <string>

namespace megashard {

inline constexpr const char* kLoopback = "127.0.0.1";

struct ListeningSocket {
  int descriptor = -1;  ///< -1: there is none
  int error = 0;        ///< then: errno. EADDRNOTAVAIL: the machine has no such address
};

/// Listens for TCP connections to the numeric address `host` ("10.0.0.1", "::1"), and to no other of this machine.
ListeningSocket listen_at(const std::string& host, int port);

/// Whether nobody reaches the numeric address from another machine.
bool is_loopback_address(const std::string& host);

}  // namespace megashard
