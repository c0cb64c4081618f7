#include "parallel/cuda/window_memory.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <thread>

namespace megashard {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

/// Scope in which this thread's allocations on the device come from the pool.
class FromPool {
 public:
  FromPool(at::cuda::MemPool& pool, c10::DeviceIndex device) : pool_(pool), device_(device) {
    allocator::beginAllocateToPool(device_, pool_.id(), [thread = std::this_thread::get_id()](cudaStream_t) {
      return std::this_thread::get_id() == thread;
    });
  }
  ~FromPool() {
    allocator::endAllocateToPool(device_, pool_.id());
    allocator::releasePool(device_, pool_.id());  // begin counts a user, end does not
  }
  FromPool(const FromPool&) = delete;
  FromPool& operator=(const FromPool&) = delete;

 private:
  at::cuda::MemPool& pool_;
  c10::DeviceIndex device_;
};

}  // namespace

WindowMemory allocate_window(c10d::ProcessGroupNCCL& nccl, int64_t bytes, c10::Device device) {
  WindowMemory memory;
  memory.pool =
      std::make_unique<at::cuda::MemPool>(std::dynamic_pointer_cast<allocator::CUDAAllocator>(nccl.getMemAllocator()));
  const FromPool scope(*memory.pool, device.index());
  memory.bytes = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
  return memory;
}

}  // namespace megashard
