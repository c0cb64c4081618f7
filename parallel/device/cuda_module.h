#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/device/device_plan.h"

namespace megashard {

struct CopyTable;
struct Float8Quantise;
struct Float8Dequantise;
struct AdamWTable;
struct SquaresTable;
struct SquaresTotal;

/// Kernels of libmegashard_cuda.so; asynchronous on the current stream of the current device.
struct CudaKernels {
  void (*copy)(const CopyTable& table);
  void (*quantise)(const Float8Quantise& quantise);
  void (*dequantise)(const Float8Dequantise& dequantise);
  void (*adamw)(const AdamWTable& table);
  void (*squares)(const SquaresTable& table);
  void (*squares_total)(const SquaresTotal& of);
};

/// Loads the module on the first call.
const CudaKernels& cuda_kernels();

}  // namespace megashard

namespace at {
class Tensor;
}

namespace megashard {

struct GroupStore;
class ProcessGroup;

struct NcclGroupOptions {
  std::shared_ptr<GroupStore> store{};
  int rank = 0;
  std::vector<int> ranks{};  ///< members as world ranks
  std::string name = "world";
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  int device = 0;  ///< index of this rank's GPU
};

/// Number of times the host waited for a device.
struct HostSync {
  std::string how;    ///< "cudaStreamSynchronize", "a blocking copy", an operator that reads values
  std::string place;  ///< function that waited; empty if places are not recorded
  int64_t count = 0;
};

/// Functions of libmegashard_cuda.so. A separate module, because linking libtorch_cuda costs 350 MB of resident memory
/// and start-up time even without a GPU.
struct CudaModule {
  int (*device_count)();                  ///< 0 without a driver or a GPU
  void (*set_device)(int index);          ///< current device of the calling thread
  std::string (*device_name)(int index);  ///< "NVIDIA H200"
  /// Identity of a GPU: the same in all processes, unique among all GPUs.
  std::string (*device_identity)(int index);
  /// Pinned memory of exactly `bytes` bytes, allocated at once and until it is freed; for buffers too large for
  /// LibTorch's pinned blocks, which are powers of two.
  at::Tensor (*pinned_bytes)(int64_t bytes);
  std::shared_ptr<ProcessGroup> (*make_nccl_group)(const NcclGroupOptions& options);
  /// Errors that the device found in the program since the last call, one message each. Null: no checks.
  std::vector<std::string> (*take_findings)();
  std::string (*what_was_checked)();  ///< "1234 operations on streams"
  /// Starts counting host syncs, with places or without. Null: not supported.
  void (*log_host_syncs)(bool places);
  std::vector<HostSync> (*take_host_syncs)();  ///< since the last call
  CudaKernels kernels;
  DevicePlan plan{};  ///< set by the simulated device; else null
};

/// Loads libmegashard_sim.so instead, which simulates a CUDA device on the CPU for tests and diagnosis
/// (docs/simulated_device.md). Call before anything uses CUDA.
void use_simulated_device();

/// Loads the module from libmegashard's folder on the first call, and LibTorch's CUDA kernels with it. Throws if this
/// build has no CUDA.
CudaModule load_cuda_module();

}  // namespace megashard
