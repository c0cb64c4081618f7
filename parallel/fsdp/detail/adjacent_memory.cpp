#include "parallel/fsdp/detail/adjacent_memory.h"

#include <utility>

#include "parallel/device/memory_use.h"
#include "parallel/device/tensor_table.h"

namespace megashard {
namespace {

TensorTable<AdjacentPlace>& adjacent_places() {
  static auto* table = new TensorTable<AdjacentPlace>;  // leaked: models may outlive static destruction
  return *table;
}

}  // namespace

void set_adjacent_place(const at::Tensor& weight, const AdjacentPlace& place) { adjacent_places().set(weight, place); }

std::optional<AdjacentPlace> adjacent_place(const at::Tensor& weight) { return adjacent_places().find(weight); }

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
