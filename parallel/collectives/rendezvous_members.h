#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "parallel/collectives/rendezvous.h"
#include "parallel/collectives/start_wait.h"

namespace megashard {

/// Returns when every rank is there once, all of them started for the same world and each with a
/// GPU of its own (`gpu`: its identity; empty: it has none). A rank that finds
/// otherwise tells the others, which throw its message. At the deadline all throw who did not
/// come. Collective; included by .cpp files only.
void meet_all_ranks(c10d::Store& store, const RendezvousOptions& options, const std::string& gpu,
                    const StartDeadline& deadline, WaitTeller& teller);

}  // namespace megashard
