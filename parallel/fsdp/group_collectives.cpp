#include "parallel/fsdp/group_collectives.h"

#include <c10/util/Exception.h>

namespace megashard {

at::Tensor checked_buffer(at::Tensor buffer, const char* allocator, int64_t numel,
                          at::ScalarType dtype, c10::Device device) {
  TORCH_CHECK(buffer.defined(), allocator, " allocated nothing where ", numel, " elements were asked for");
  TORCH_CHECK(buffer.numel() == numel && buffer.scalar_type() == dtype && buffer.device() == device &&
              buffer.is_contiguous(), allocator, " allocated ", buffer.scalar_type(), buffer.sizes(), " on ", buffer.device(),
              " where ", numel, " contiguous elements of ", dtype, " on ", device, " were asked for");
  return buffer;
}

}  // namespace megashard
