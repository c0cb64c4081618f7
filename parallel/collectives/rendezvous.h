#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "parallel/collectives/process_group.h"

namespace megashard {

struct RendezvousOptions {
  int rank = 0;
  int world_size = 1;
  /// Modulo the GPUs that this process sees: its GPU. -1: nobody said; takes the rank. A launcher
  /// may show each rank a GPU of its own, which is then number 0 for all of them.
  int local_rank = 0;
  int local_world_size = 0;  ///< ranks on this machine; 0: unknown. Equal to world_size: sockets stay on loopback
  /// Where the ranks meet: "tcp://HOST:PORT" (rank 0 listens there), "file:///PATH" (a new file in
  /// a folder that all ranks see), or "env://" (tcp:// with master_addr and master_port, which
  /// launch/ took from the environment).
  std::string init_method = "env://";
  std::string master_addr{};
  int master_port = 0;
  /// Not empty: somebody already listens at the address (torchrun's agent,
  /// TORCHELASTIC_USE_AGENT_STORE), no rank does; keys get this prefix, which differs from restart
  /// to restart ("/worker/attempt_0").
  std::string agent_store_prefix{};
  std::string backend = "gloo";  ///< "gloo", "nccl" or "cpu:gloo,cuda:nccl"
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Takes a line that says for whom this rank waits, when a wait lasts: after `first_notice`, then
  /// after twice as long, and so on; from another thread. Null: nobody is told.
  std::function<void(const std::string& line)> notice{};
  std::chrono::milliseconds first_notice = std::chrono::seconds(3);
  /// Takes a line about a wait of the groups on the CPU that lasts, with rank, unit and step: after 30 s, and each time
  /// that it has lasted twice as long. On the thread that waits. Null: nobody is told.
  std::function<void(const std::string& line)> long_wait{};
};

/// The group of all ranks (torch.distributed.init_process_group). With NCCL, loads CUDA and makes
/// its GPU the current device of the calling thread. Collective; checks that the ranks agree on the
/// world size and that no two have the same rank or the same GPU. Throws one error with the
/// remedy for what a user can get wrong, at the deadline for ranks that do not come. SIGPIPE is
/// ignored from then on, unless the program handles it.
ProcessGroupPtr init_process_group(const RendezvousOptions& options);

}  // namespace megashard
