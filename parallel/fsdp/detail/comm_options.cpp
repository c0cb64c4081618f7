#include "parallel/fsdp/detail/comm_options.h"

#include <c10/util/Exception.h>

#include "parallel/device/buffer_pool.h"
#include "parallel/device/memory_use.h"
#include "parallel/device/storage.h"

namespace megashard {

at::Tensor allocate_comm_buffer(Comm* custom, const char* kind, const std::optional<GroupMemory>& memory,
                                ProcessGroup& group, int64_t numel, at::ScalarType dtype, c10::Device device) {
  if (custom == nullptr) {
    at::Tensor buffer = memory ? group.allocate(numel, dtype, device, *memory) : pooled_empty(numel, dtype, device);
    auto& storage = *buffer.storage().unsafeGetStorageImpl();
    give_memory(storage, counted_memory(MemoryClass::kCommunication, take_memory(storage), storage.nbytes()));
    return buffer;
  }
  at::Tensor buffer = custom->allocate(numel, dtype, device);
  TORCH_CHECK_VALUE(buffer.defined(), "the custom ", kind, " allocated nothing where ", numel,
                    " elements were asked for");
  TORCH_CHECK_VALUE(
      buffer.numel() == numel && buffer.scalar_type() == dtype && buffer.device() == device && buffer.is_contiguous(),
      "the custom ", kind, " allocated ", buffer.scalar_type(), buffer.sizes(), " on ", buffer.device(), " where ",
      numel, " contiguous elements of ", dtype, " on ", device, " were asked for");
  return buffer;
}

}  // namespace megashard
