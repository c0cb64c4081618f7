#include "parallel/device/signals_held.h"

#include <ATen/Parallel.h>

#include <utility>

namespace megashard {
namespace {

/// All but those of a fault of the thread itself: the kernel ends a process that blocks one of them, whatever handler
/// it has.
void block_signals(sigset_t* before = nullptr) {
  sigset_t signals;
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&signals, fault);
  pthread_sigmask(SIG_BLOCK, &signals, before);
}

}  // namespace

SignalsHeld::SignalsHeld() {
  block_signals(&before_);
  // OpenMP's threads have nothing to do with signals: they never take one again. New ones inherit the mask.
  thread_local int team = 1;
  const int threads = at::get_num_threads();
  if (threads > 1 && !at::in_parallel_region() && std::exchange(team, threads) != threads)
    at::parallel_for(0, threads, 1, [](int64_t begin, int64_t) {
      if (begin > 0) block_signals();
    });
}

}  // namespace megashard
