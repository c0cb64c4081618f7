#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "parallel/collectives/rendezvous.h"
#include "parallel/collectives/start_wait.h"

namespace megashard {

/// Returns when every rank has arrived once, all with the same world size and each with its own GPU (`gpu`: its
/// identity; empty: none). A rank that finds a conflict reports it to the others, and all throw its message. At the
/// deadline all throw and name the missing ranks. Collective. Include in .cpp files only.
void meet_all_ranks(c10d::Store& store, const RendezvousOptions& options, const std::string& gpu,
                    const StartDeadline& deadline, WaitTeller& teller);

}  // namespace megashard
