#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <mutex>
#include <optional>

namespace megashard {

/// A weight's place among those that keep_adjacent was given with it.
struct AdjacentPlace {
  int64_t set = 0;  ///< a number of their own
  size_t index = 0;
  size_t count = 0;
};
void set_adjacent_place(const at::Tensor& weight, const AdjacentPlace& place);
std::optional<AdjacentPlace> adjacent_place(const at::Tensor& weight);

/// The memory of several unsharded storages, one after the other: there from the first that is allocated until the last
/// one is released.
class AdjacentMemory : public c10::intrusive_ptr_target {
 public:
  AdjacentMemory(size_t bytes, c10::Allocator* allocator) : bytes_(bytes), allocator_(allocator) {}
  c10::DataPtr part(size_t offset);  ///< keeps all of it

 private:
  static void drop_part(void* context);

  const size_t bytes_;
  c10::Allocator* const allocator_;
  std::mutex mutex_;
  c10::DataPtr memory_;
  int parts_ = 0;
};

}  // namespace megashard
