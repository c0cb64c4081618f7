#pragma once

#include <pthread.h>

namespace megashard::testing {

/// From here on this process, a death test's, can start no thread: each asks for a stack of 128 TiB,
/// which is all of the address space.
inline void refuse_threads() {
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setstacksize(&attributes, size_t{1} << 47);
  ::pthread_setattr_default_np(&attributes);
}

}  // namespace megashard::testing
