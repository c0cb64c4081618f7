#include "checkpoint/files/read_queue.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>

namespace megashard {
namespace {

/// Of this process's address space.
rlim_t bytes_mapped() {
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
}

TEST(RunInThreads, WhereNoMoreCanBeHadFewerDoTheWork) {
  const auto work = [] {
    pthread_attr_t large;  // more than stacks that are kept for the next thread have
    ::pthread_attr_init(&large);
    ::pthread_attr_setstacksize(&large, 64 << 20);
    ::pthread_setattr_default_np(&large);
    rlimit limit{};
    ::getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = bytes_mapped() + (1 << 20);  // no room for the stack of a thread
    ::setrlimit(RLIMIT_AS, &limit);
    std::atomic<int> done = 0;
    run_in_threads(4, 100, [&](const NextItem& next) {
      while (next()) ++done;
    });
    std::_Exit(done == 100 ? 0 : 1);
  };
  EXPECT_EXIT(work(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace megashard
