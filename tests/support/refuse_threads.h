#pragma once

#include <pthread.h>

namespace megashard::testing {

/// From now on this process, which is a death test's, can start no thread: each thread asks for a stack of 128 TiB, the
/// whole address space.
inline void refuse_threads() {
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setstacksize(&attributes, size_t{1} << 47);
  ::pthread_setattr_default_np(&attributes);
}

}  // namespace megashard::testing
