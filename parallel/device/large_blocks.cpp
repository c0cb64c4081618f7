#include "parallel/device/large_blocks.h"

#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "parallel/device/buffer_pool.h"

namespace megashard {
namespace {

constexpr uint8_t kPriority = 255;

class LargeBlocks final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kPooledFrom) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    auto block = cpu_buffer_pool()->allocate(bytes);
    void* const begin = block.get();
    const std::scoped_lock lock(mutex_);
    blocks_.insert_or_assign(begin, std::move(block));
    return {begin, begin, &release, c10::kCPU};
  }
  // oneDNN keeps only a block's address, and may free blocks of the previous allocator here.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* begin);

  std::mutex mutex_;
  std::unordered_map<void*, c10::DataPtr> blocks_;
};

LargeBlocks& large_blocks() {
  static auto* blocks = new LargeBlocks;  // leaked: tensors may outlive static destruction
  return *blocks;
}

void LargeBlocks::release(void* begin) {
  auto& own = large_blocks();
  {
    const std::scoped_lock lock(own.mutex_);
    if (own.blocks_.erase(begin) != 0) return;
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(begin);
}

}  // namespace

PooledLargeTensors::PooledLargeTensors() : before_(c10::GetAllocator(c10::kCPU)) {
  c10::SetAllocator(c10::kCPU, &large_blocks(), kPriority);
}

PooledLargeTensors::~PooledLargeTensors() { c10::SetAllocator(c10::kCPU, before_, kPriority); }

}  // namespace megashard
