#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "parallel/collectives/process_group.h"
#include "parallel/collectives/start_wait.h"

namespace megashard {

struct RendezvousOptions {
  int rank = 0;
  int world_size = 1;
  /// This process's GPU is local_rank modulo its visible GPUs. -1: unknown, uses the rank. A launcher may make only one
  /// GPU visible to each rank, which is then number 0 on all of them.
  int local_rank = 0;
  int local_world_size = 0;  ///< ranks on this machine; 0: unknown. If equal to world_size, sockets use loopback
  /// Meeting place: "tcp://HOST:PORT" (rank 0 listens there), "file:///PATH" (a new file in a folder that all ranks
  /// see), or "env://" (tcp:// with master_addr and master_port, which launch/ reads from the environment).
  std::string init_method = "env://";
  std::string master_addr{};
  int master_port = 0;
  /// If not empty, another process already listens at the address (torchrun's agent, TORCHELASTIC_USE_AGENT_STORE), and
  /// no rank does. Prefix of all keys, different for each restart ("/worker/attempt_0").
  std::string agent_store_prefix{};
  std::string backend = "gloo";  ///< "gloo", "nccl" or "cpu:gloo,cuda:nccl"
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Gets a line that says which rank this one waits for: after `first_notice`, then each time the wait has doubled;
  /// from another thread. Null: no notices.
  std::function<void(const std::string& line)> notice{};
  std::chrono::milliseconds first_notice = std::chrono::seconds(3);
  /// Gets a line about a long wait of the CPU groups, with rank, unit and step: after 30 s, then each time the wait has
  /// doubled; on the waiting thread. Null: no notices.
  std::function<void(const std::string& line)> long_wait{};
};

/// Creates the group of all ranks (torch.distributed.init_process_group). With NCCL, loads CUDA and makes this rank's
/// GPU the calling thread's current device. Collective. Checks that ranks agree on the world size and that no two have
/// the same rank or GPU. Throws an error with the remedy for user mistakes, and at the deadline for missing ranks.
/// Ignores SIGPIPE from then on unless the program handles it.
ProcessGroupPtr init_process_group(const RendezvousOptions& options);

/// Returns when every rank has arrived once, all with the same world size and each with its own GPU (`gpu`: its
/// identity; empty: none). A rank that finds a conflict reports it to the others, and all throw its message. At the
/// deadline all throw and name the missing ranks. Collective. Include in .cpp files only.
void meet_all_ranks(c10d::Store& store, const RendezvousOptions& options, const std::string& gpu,
                    const StartDeadline& deadline, WaitTeller& teller);

}  // namespace megashard
