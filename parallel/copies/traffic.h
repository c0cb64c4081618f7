#pragma once

#include <cstdint>

namespace megashard {

/// Bytes of one launch of a kernel, from the sizes of its arrays: traffic_of(launch), which stands beside each kernel.
struct Traffic {
  int64_t moved;  ///< what its threads load and store of device memory, whether or not a cache has it
  int64_t again;  ///< of these, what the launch has read before: a norm's weight for each row, a table for each head
  int64_t least;  ///< what any kernel has to move: each input read once, each output written once
};

}  // namespace megashard
