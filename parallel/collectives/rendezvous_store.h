#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

#include "parallel/collectives/rendezvous.h"
#include "parallel/collectives/start_wait.h"

namespace megashard {

struct MeetingStore {
  c10::intrusive_ptr<c10d::Store> store{};
  std::string reached{};  ///< its machine's numeric address, as this rank reaches it
  std::string own{};      ///< AddressProbe's; either is empty for a file
};

/// The store at the address of `options`: rank 0 serves it, the others wait until it does, and
/// throw at the deadline what became of the name, of the connection, or of the answer. Included by
/// .cpp files only.
MeetingStore make_tcp_store(const RendezvousOptions& options, const StartDeadline& deadline, WaitTeller& teller);
MeetingStore make_file_store(const RendezvousOptions& options);

/// Where the ranks meet, as a user reads it: "gpu1:29500" or the file's path.
std::string meeting_place(const RendezvousOptions& options);

}  // namespace megashard
