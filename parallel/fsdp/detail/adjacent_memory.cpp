#include "parallel/fsdp/detail/adjacent_memory.h"

#include <utility>

#include "parallel/device/memory_use.h"

namespace megashard {
c10::DataPtr AdjacentMemory::part(size_t offset) {
  const std::lock_guard lock(mutex_);
  if (parts_ == 0) memory_ = counted_memory(MemoryClass::kUnsharded, allocator_->allocate(bytes_), bytes_);
  ++parts_;
  auto self = c10::intrusive_ptr<AdjacentMemory>::reclaim_copy(this);
  return {static_cast<char*>(memory_.get()) + offset, self.release(), &drop_part, memory_.device()};
}

void AdjacentMemory::drop_part(void* context) {
  const auto self = c10::intrusive_ptr<AdjacentMemory>::reclaim(static_cast<AdjacentMemory*>(context));
  const std::lock_guard lock(self->mutex_);
  if (--self->parts_ == 0) self->memory_.clear();
}

}  // namespace megashard
