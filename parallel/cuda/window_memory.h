#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/MemPool.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <memory>

namespace megashard {

/// ncclMemAlloc memory, which NCCL can map into other GPUs, in a pool that holds nothing else.
struct WindowMemory {
  std::unique_ptr<at::cuda::MemPool> pool;
  at::Tensor bytes;
};

/// Allocates on `device`, the current one. Throws c10::OutOfMemoryError. Include in .cpp files only.
WindowMemory allocate_window(c10d::ProcessGroupNCCL& nccl, int64_t bytes, c10::Device device);

}  // namespace megashard
