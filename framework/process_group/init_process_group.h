#pragma once

#include <string>

#include "parallel/collectives/rendezvous.h"

namespace megashard {

/// Creates the group of all ranks from the launcher's variables (torchrun, megashard launch, Open MPI, MPICH, Slurm;
/// one process without any), as torch.distributed.init_process_group. init_method: "env://", "tcp://HOST:PORT" or
/// "file:///PATH". Uses NCCL and Gloo if this process can use a GPU, else Gloo. Collective. Throws UsageError for
/// missing or contradicting variables.
ProcessGroupPtr init_process_group(const std::string& init_method = "env://");

}  // namespace megashard
