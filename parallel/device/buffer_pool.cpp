#include "parallel/device/buffer_pool.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <mutex>
#include <unordered_map>
#include <vector>

namespace megashard {
namespace {

class CpuBufferPool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    Block* block = take(pooled_size(bytes), bytes);
    return {block->data, block, &give_back, c10::kCPU};
  }
  int64_t bytes() {
    const std::lock_guard lock(mutex_);
    return handed_out_;
  }
  void observe(std::function<void(int64_t)> observer) {
    const std::lock_guard lock(mutex_);
    observer_ = std::move(observer);
  }
  void copy_data(void* destination, const void* source, size_t count) const override {
    default_copy_data(destination, source, count);
  }

 private:
  struct Block {
    CpuBufferPool* pool;
    size_t bytes;
    void* data;
    size_t asked;
  };

  Block* take(size_t bytes, size_t asked) {
    {
      const std::lock_guard lock(mutex_);
      note(static_cast<int64_t>(asked));
      auto& free = free_[bytes];
      if (!free.empty()) {
        Block* block = free.back();
        free.pop_back();
        block->asked = asked;
        return block;
      }
    }
    return new Block{this, bytes, c10::alloc_cpu(bytes), asked};
  }

  static void give_back(void* context) {
    auto* block = static_cast<Block*>(context);
    const std::lock_guard lock(block->pool->mutex_);
    block->pool->note(-static_cast<int64_t>(block->asked));
    block->pool->free_[block->bytes].push_back(block);
  }

  void note(int64_t bytes) {
    handed_out_ += bytes;
    if (observer_) observer_(bytes);
  }

  std::mutex mutex_;
  int64_t handed_out_ = 0;
  std::function<void(int64_t)> observer_;
  std::unordered_map<size_t, std::vector<Block*>> free_;
};

CpuBufferPool& the_pool() {
  static auto* pool = new CpuBufferPool;  // leaked: tensors may outlive static destruction
  return *pool;
}

}  // namespace

c10::Allocator* cpu_buffer_pool() { return &the_pool(); }

int64_t cpu_buffer_pool_bytes() { return the_pool().bytes(); }

void observe_cpu_buffer_pool(std::function<void(int64_t bytes)> observer) { the_pool().observe(std::move(observer)); }

at::Tensor pooled_empty(int64_t numel, at::ScalarType dtype, c10::Device device) {
  if (!device.is_cpu()) return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
  return at::detail::empty_generic({numel}, cpu_buffer_pool(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

}  // namespace megashard
