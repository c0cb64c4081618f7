#include "launch/ranks/failure.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "framework/diagnostics.h"

namespace megashard {
namespace {

class Failure : public testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
                             "PMI_RANK", "PMI_SIZE", kStackVariable}) {
      unsetenv(name);
    }
  }
  void set_rank(const char* rank, const char* world) {
    setenv("RANK", rank, 1);
    setenv("LOCAL_RANK", rank, 1);
    setenv("WORLD_SIZE", world, 1);
  }
  template <class Error>
  int run(const Error& error) {
    testing::internal::CaptureStderr();
    const int code = run_program([&error]() -> int { throw error; }, patience_);
    printed_ = testing::internal::GetCapturedStderr();
    return code;
  }
  std::string printed_;
  std::chrono::milliseconds patience_ = std::chrono::minutes(1);
};

TEST_F(Failure, SuccessPrintsNothing) {
  EXPECT_EQ(run_program([] { return 0; }), 0);
}

TEST_F(Failure, ExceptionIsOneMessage) {
  EXPECT_EQ(run(std::runtime_error("no data\n")), 1);
  EXPECT_EQ(printed_, "megashard: error: no data\n");
}

TEST_F(Failure, RankStandsBeforeItInAWorldOfSeveral) {
  set_rank("3", "4");
  EXPECT_EQ(run(std::runtime_error("no data")), 1);
  EXPECT_EQ(printed_, "megashard: error: rank 3: no data\n");
  set_rank("0", "1");
  run(std::runtime_error("no data"));
  EXPECT_EQ(printed_, "megashard: error: no data\n");
}

TEST_F(Failure, RankIsThatOfReadEnvironment) {
  setenv("SLURM_PROCID", "1", 1);  // srun sets the variables of PMI, too
  setenv("SLURM_NTASKS", "2", 1);
  setenv("SLURM_LOCALID", "0", 1);
  setenv("PMI_RANK", "0", 1);
  setenv("PMI_SIZE", "1", 1);
  run(std::runtime_error("no data"));
  EXPECT_EQ(printed_, "megashard: error: rank 1: no data\n");
}

TEST_F(Failure, UsageErrorIsSaidByTheFirstRankOfAHost) {
  EXPECT_EQ(run(UsageError("unknown flag")), 2);
  EXPECT_EQ(printed_, "megashard: error: unknown flag\n");
  set_rank("0", "2");
  EXPECT_EQ(run(UsageError("unknown flag")), 2);
  EXPECT_EQ(printed_, "megashard: error: unknown flag\n");
}

TEST_F(Failure, UsageErrorIsSaidByAnotherRankThatNobodyEnds) {
  set_rank("1", "2");
  patience_ = std::chrono::milliseconds(1);
  EXPECT_EQ(run(UsageError("unknown flag")), 2);
  EXPECT_EQ(printed_, "megashard: error: rank 1: unknown flag\n");
}

TEST_F(Failure, UsageErrorOfOneRankIsSaidByIt) {
  set_rank("1", "2");
  EXPECT_EQ(run(OwnUsageError("MASTER_PORT is 0")), 2);
  EXPECT_EQ(printed_, "megashard: error: rank 1: MASTER_PORT is 0\n");
}

TEST_F(Failure, StackOnlyWhenAskedFor) {
  const std::runtime_error error("bad shape\nException raised from f at g.cpp:1 (most recent call first):\nframe #0");
  EXPECT_EQ(error_message(error), "bad shape");
  setenv(kStackVariable, "1", 1);
  EXPECT_NE(error_message(error).find("frame #0"), std::string::npos);
}

TEST_F(Failure, OutOfMemoryNamesRemedies) {
  EXPECT_EQ(run(std::bad_alloc()), 1);
  EXPECT_NE(printed_.find("out of memory: take a smaller --micro-batch"), std::string::npos);
  run(std::runtime_error("DefaultCPUAllocator: can't allocate memory: 8 bytes"));
  EXPECT_NE(printed_.find("out of memory (DefaultCPUAllocator: can't allocate memory: 8 bytes): "
                          "take a smaller --micro-batch"),
            std::string::npos);
}

}  // namespace
}  // namespace megashard
