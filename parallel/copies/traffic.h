#pragma once

#include <cstdint>

namespace megashard {

/// Memory traffic in bytes of one kernel launch, computed from array sizes: traffic_of(launch), next to each kernel.
struct Traffic {
  int64_t moved;  ///< loaded and stored by its threads, cached or not
  int64_t again;  ///< part of it that re-reads: a norm's weight for each row, a table for each head
  int64_t least;  ///< minimum for any kernel: each input read once, each output written once
};

}  // namespace megashard
