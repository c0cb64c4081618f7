#include "checkpoint/files/run_in_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>

#include "tests/support/refuse_threads.h"

namespace megashard {
namespace {

TEST(RunInThreads, WhereNoMoreCanBeHadFewerDoTheWork) {
  const auto work = [] {
    testing::refuse_threads();
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
