#pragma once

#include <c10/core/Device.h>

namespace megashard::testing {

/// Makes the calling thread's `type` the device of tensors that the test program's own code creates without naming a
/// device, as torch.set_default_device(). Tensors that libmegashard creates keep their device: that is the code under
/// test.
void set_default_device_of_tests(c10::DeviceType type);

/// While an object of this class lives, this thread creates tensors on the CPU: for data that are read on the host.
class MadeOnTheHost {
 public:
  MadeOnTheHost();
  ~MadeOnTheHost();
  MadeOnTheHost(const MadeOnTheHost&) = delete;
  MadeOnTheHost& operator=(const MadeOnTheHost&) = delete;
};

}  // namespace megashard::testing
