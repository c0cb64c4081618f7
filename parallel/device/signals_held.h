#pragma once

#include <signal.h>

namespace megashard {

/// While it lives, neither this thread nor the OpenMP threads that work for it take signals: other threads do, or they
/// wait. For code that leaves the stack, as oneDNN's generated products do (LibTorch 2.11: "gemm:jit:f32" points the
/// stack register into the heap): the kernel would write a handler's frame over other blocks there. A microsecond.
class SignalsHeld {
 public:
  SignalsHeld();
  ~SignalsHeld() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

 private:
  sigset_t before_;
};

}  // namespace megashard
