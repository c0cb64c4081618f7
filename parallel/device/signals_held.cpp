#include "parallel/device/signals_held.h"

#include <ATen/Parallel.h>

#include <utility>

namespace megashard {
namespace {

void block_all(sigset_t* before = nullptr) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, before);
}

}  // namespace

SignalsHeld::SignalsHeld() {
  block_all(&before_);
  // OpenMP's threads have nothing to do with signals: they never take one again. New ones inherit the mask.
  thread_local int team = 1;
  const int threads = at::get_num_threads();
  if (threads > 1 && !at::in_parallel_region() && std::exchange(team, threads) != threads)
    at::parallel_for(0, threads, 1, [](int64_t begin, int64_t) {
      if (begin > 0) block_all();
    });
}

}  // namespace megashard
