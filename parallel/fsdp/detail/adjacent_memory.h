#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <mutex>

namespace megashard {

/// One memory block for several adjacent unsharded storages: allocated with the first storage, freed with the last.
class AdjacentMemory : public c10::intrusive_ptr_target {
 public:
  AdjacentMemory(size_t bytes, c10::Allocator* allocator) : bytes_(bytes), allocator_(allocator) {}
  c10::DataPtr part(size_t offset);  ///< keeps the whole block alive

 private:
  static void drop_part(void* context);

  const size_t bytes_;
  c10::Allocator* const allocator_;
  std::mutex mutex_;
  c10::DataPtr memory_;
  int parts_ = 0;
};

}  // namespace megashard
