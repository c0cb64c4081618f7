#include "parallel/device/kept_buffers.h"

#include <ATen/ops/from_blob.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace megashard {

struct KeptBuffers::Free {
  using Place = std::pair<c10::StreamId, int64_t>;  // stream, bytes

  std::mutex mutex;
  std::map<Place, std::vector<at::Tensor>> blocks;
};

KeptBuffers::KeptBuffers() : free_(std::make_shared<Free>()) {}

at::Tensor KeptBuffers::take(int64_t numel, at::ScalarType dtype, const c10::Stream& stream,
                             const std::function<at::Tensor(int64_t bytes)>& make) {
  const Free::Place place(stream.id(), numel * static_cast<int64_t>(c10::elementSize(dtype)));
  at::Tensor block;
  {
    const std::lock_guard lock(free_->mutex);
    auto& blocks = free_->blocks[place];
    if (!blocks.empty()) {
      block = std::move(blocks.back());
      blocks.pop_back();
    }
  }
  if (!block.defined()) block = make(place.second);
  void* memory = block.mutable_data_ptr();
  const auto give_back = [free = std::weak_ptr(free_), place, block](void*) {
    if (const auto there = free.lock()) {
      const std::lock_guard lock(there->mutex);
      there->blocks[place].push_back(block);
    }
  };
  const auto options = block.options().dtype(dtype);
  return at::for_blob(memory, {numel}).deleter(give_back).options(options).target_device(block.device()).make_tensor();
}

}  // namespace megashard
