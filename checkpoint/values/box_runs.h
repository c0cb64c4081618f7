#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>

namespace megashard {

/// Calls visit(first element in the whole, first in the box, elements) for each run of a box's elements that is
/// contiguous in the whole tensor, in the order of the box. `whole`: the tensor's sizes.
void for_each_run(c10::IntArrayRef whole, c10::IntArrayRef offsets, c10::IntArrayRef sizes,
                  const std::function<void(int64_t in_whole, int64_t in_box, int64_t elements)>& visit);

}  // namespace megashard
