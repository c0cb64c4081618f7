#include "parallel/device/signals_held.h"

#include <ATen/Parallel.h>

#include <utility>

namespace megashard {
namespace {

/// Blocks all signals except those of the thread's own faults: the kernel kills a process that blocks one of these,
/// whatever its handler.
void block_signals(sigset_t* before = nullptr) {
  sigset_t signals;
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&signals, fault);
  pthread_sigmask(SIG_BLOCK, &signals, before);
}

}  // namespace

SignalsHeld::SignalsHeld() {
  block_signals(&before_);
  // OpenMP's threads need no signals: they keep the mask for good. New ones inherit it.
  thread_local int team = 1;
  const int threads = at::get_num_threads();
  if (threads > 1 && !at::in_parallel_region() && std::exchange(team, threads) != threads)
    at::parallel_for(0, threads, 1, [](int64_t begin, int64_t) {
      if (begin > 0) block_signals();
    });
}

}  // namespace megashard
