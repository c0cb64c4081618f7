#pragma once

#include <string>

#include "parallel/collectives/gloo_process_group.h"
#include "parallel/cuda/cuda_kernels.h"

namespace megashard {

struct NcclGroupOptions {
  GroupStorePtr store{};
  int rank = 0;
  std::vector<int> ranks{};  ///< members as ranks of the world
  std::string name = "world";
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  int device = 0;  ///< index of this rank's GPU
};

/// What libmegashard_cuda.so offers. It is a module of its own because linking libtorch_cuda costs
/// 350 MB of resident memory, and start-up time, also where there is no GPU.
struct CudaModule {
  int (*device_count)();                  ///< 0 without a driver or a GPU
  void (*set_device)(int index);          ///< current device of the calling thread
  std::string (*device_name)(int index);  ///< "NVIDIA H200"
  ProcessGroupPtr (*make_nccl_group)(const NcclGroupOptions& options);
  CudaKernels kernels;
};

/// Loads the module from the folder of libmegashard (the first time) and with it LibTorch's CUDA
/// kernels. Throws one sentence where this build has no CUDA.
CudaModule load_cuda_module();

}  // namespace megashard
