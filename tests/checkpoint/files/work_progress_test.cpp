#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/files/crc32.h"
#include "checkpoint/files/run_in_threads.h"
#include "checkpoint/files/work_progress.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/refuse_threads.h"

namespace megashard {
namespace {

class WorkProgressTest : public ::testing::Test {
 protected:
  std::vector<std::string> heard_;
  WorkWatch watch_{[this](const WorkProgress& progress) {
    heard_.push_back(std::string(progress.name) + " " + std::to_string(progress.done) + "/" +
                     std::to_string(progress.total) + (progress.has_ended ? " end" : ""));
  }};
};

TEST_F(WorkProgressTest, IsToldFromBeginToEnd) {
  {
    LongWork work("load", 10);
    work.add(4);
    std::thread([&work] { work.add(6); }).join();
  }
  { const LongWork work("save", 1); }
  EXPECT_EQ(heard_, (std::vector<std::string>{"load 0/10", "load 4/10", "load 10/10", "load 10/10 end", "save 0/1",
                                              "save 0/1 end"}));
}

TEST_F(WorkProgressTest, WorkWithinAnotherAndOfOtherThreadsIsNotTold) {
  {
    LongWork outer("outer", 2);
    LongWork inner("inner", 2);
    inner.add(1);
  }
  std::thread([] { LongWork("elsewhere", 1).add(1); }).join();
  EXPECT_EQ(heard_, (std::vector<std::string>{"outer 0/2", "outer 0/2 end"}));
}

TEST(WorkProgress, ReadsAndChecksumsCountTheirBytes) {
  const TemporaryFolder folder;
  const auto path = folder.path() + "/file";
  constexpr int64_t kBytes = 20 << 20;  // more than one read
  write_file_atomically(path, std::string(kBytes, 'x'));
  std::mutex mutex;
  int64_t done = 0, ends = 0;
  const WorkWatch watch([&](const WorkProgress& progress) {
    const std::lock_guard lock(mutex);
    done = std::max(done, progress.done);
    ends += progress.has_ended ? 1 : 0;
  });
  const InputFile file(path);
  {
    LongWork work("check", kBytes);
    crc32_of(file, 0, kBytes, &work);
    EXPECT_EQ(done, kBytes);
  }
  done = 0;
  {
    LongWork work("load", kBytes);
    std::string into(kBytes, '\0');
    ReadQueue reads;
    reads.add(file, into.data(), kBytes, 0);
    EXPECT_EQ(reads.bytes(), kBytes);
    reads.run(&work);
    EXPECT_EQ(done, kBytes);
    EXPECT_EQ(reads.bytes(), 0);
  }
  EXPECT_EQ(ends, 2);
}

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
