#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

#include "parallel/collectives/rendezvous.h"
#include "parallel/collectives/start_wait.h"

namespace megashard {

struct MeetingStore {
  c10::intrusive_ptr<c10d::Store> store{};
  std::string reached{};  ///< numeric address of the store's machine, as this rank reaches it
  std::string own{};      ///< AddressProbe::own; both are empty for a file
};

/// Store at the address of `options`: rank 0 serves it; the others wait for it and throw at the deadline, with the
/// state of the name lookup, the connection or the answer. Include in .cpp files only.
MeetingStore make_tcp_store(const RendezvousOptions& options, const StartDeadline& deadline, WaitTeller& teller);
MeetingStore make_file_store(const RendezvousOptions& options);

/// Meeting place for messages: "gpu1:29500" or the file's path.
std::string meeting_place(const RendezvousOptions& options);

}  // namespace megashard
