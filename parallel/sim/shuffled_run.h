#pragma once

#include <cstdint>

namespace megashard::sim {

class SimDevice;

// The second way of running, where settings().shuffle_seed is not 0. What streams run between two
// waits of the host is kept; when the host waits, memory is put back to where it was, everything
// runs again, each stream a queue and the turns drawn at random, and all memory must be what it was
// after the first run, bit for bit. What no vector clock knows of (an access that the model forgot)
// shows here.

void begin_shuffled_window(SimDevice& device);
void end_shuffled_window(SimDevice& device);
int64_t shuffled_windows();  ///< run a second time so far, on all devices

}  // namespace megashard::sim
