#pragma once

#include <signal.h>

namespace megashard {

/// Scope in which neither this thread nor its OpenMP threads receive signals; other threads receive them, or they wait.
/// For code that moves the stack pointer, as oneDNN's generated products do (LibTorch 2.11: "gemm:jit:f32" points it
/// into the heap), where a handler's frame would overwrite other blocks. Takes about a microsecond.
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
