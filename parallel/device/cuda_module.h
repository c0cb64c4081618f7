#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/device/cuda_kernels.h"
#include "parallel/device/device_plan.h"

namespace at {
class Tensor;
}

namespace megashard {

struct GroupStore;
class ProcessGroup;

struct NcclGroupOptions {
  std::shared_ptr<GroupStore> store{};
  int rank = 0;
  std::vector<int> ranks{};  ///< members as ranks of the world
  std::string name = "world";
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  int device = 0;  ///< index of this rank's GPU
};

/// How often the host waited for a device.
struct HostSync {
  std::string how;    ///< "cudaStreamSynchronize", "a blocking copy", an operator that reads values
  std::string place;  ///< the function that did it; empty: not asked for
  int64_t count = 0;
};

/// What libmegashard_cuda.so offers. It is a module of its own because linking libtorch_cuda costs
/// 350 MB of resident memory, and start-up time, also where there is no GPU.
struct CudaModule {
  int (*device_count)();                  ///< 0 without a driver or a GPU
  void (*set_device)(int index);          ///< current device of the calling thread
  std::string (*device_name)(int index);  ///< "NVIDIA H200"
  /// The same for one GPU in all processes, and for no two GPUs anywhere.
  std::string (*device_identity)(int index);
  /// Page-locked memory of so many bytes and no more, at once and until it is freed: for what is
  /// too large for LibTorch's pinned blocks, which are powers of two.
  at::Tensor (*pinned_bytes)(int64_t bytes);
  std::shared_ptr<ProcessGroup> (*make_nccl_group)(const NcclGroupOptions& options);
  /// What the device found wrong with the program since the last call, one message each. Null: it
  /// does not look.
  std::vector<std::string> (*take_findings)();
  std::string (*what_was_checked)();  ///< "1234 operations on streams"
  /// Count host syncs from now on, with their places or without. Null: the device cannot say.
  void (*log_host_syncs)(bool places);
  std::vector<HostSync> (*take_host_syncs)();  ///< since the last call
  CudaKernels kernels;
  DevicePlan plan{};  ///< of the simulated device; else null
};

/// Takes libmegashard_sim.so instead, which makes a CUDA device out of the CPU, for tests and
/// diagnosis: docs/simulated_device.md. Before anything asks for CUDA.
void use_simulated_device();

/// Loads the module from the folder of libmegashard (the first time) and with it LibTorch's CUDA
/// kernels. Throws one error where this build has no CUDA.
CudaModule load_cuda_module();

}  // namespace megashard
