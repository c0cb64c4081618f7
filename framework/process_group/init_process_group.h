#pragma once

#include <string>

#include "parallel/collectives/rendezvous.h"

namespace megashard {

/// The group of all ranks, as the variables of the launcher say (torchrun, megashard launch, Open MPI, MPICH, Slurm;
/// one process without any). torch.distributed.init_process_group. init_method: "env://", "tcp://HOST:PORT" or
/// "file:///PATH". NCCL and Gloo where this process can use a GPU, else Gloo. Collective. Throws UsageError for
/// variables that are missing or contradict each other.
ProcessGroupPtr init_process_group(const std::string& init_method = "env://");

}  // namespace megashard
