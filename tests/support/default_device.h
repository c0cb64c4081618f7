#pragma once

#include <c10/core/Device.h>

namespace megashard::testing {

/// From here on, tensors that the test program's own code makes without naming a device are made on
/// the calling thread's `type`, as after torch.set_default_device(). What libmegashard makes stays
/// where it says: it is the code under test.
void set_default_device_of_tests(c10::DeviceType type);

/// While one lives, what this thread makes is on the CPU: data that are read on the host.
class MadeOnTheHost {
 public:
  MadeOnTheHost();
  ~MadeOnTheHost();
  MadeOnTheHost(const MadeOnTheHost&) = delete;
  MadeOnTheHost& operator=(const MadeOnTheHost&) = delete;
};

}  // namespace megashard::testing
