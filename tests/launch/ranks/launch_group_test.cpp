#include "launch/ranks/launch_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace megashard {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::Not;

constexpr auto kDeadline = 20s;

/// Ranks are shell scripts. $DIR is an empty folder for the test.
class LaunchGroup : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "megashard_launch_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    setenv("DIR", name.c_str(), 1);
    begin_ = std::chrono::steady_clock::now();
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    EXPECT_LT(std::chrono::steady_clock::now() - begin_, kDeadline);
  }

  /// `root`: root of the kernel's files with memory counts.
  int run(int processes, const std::string& script, std::chrono::milliseconds grace = 5s,
          const std::string& root = "") {
    testing::internal::CaptureStderr();
    const int code =
        run_launch_group({.processes = processes, .command = {"/bin/sh", "-c", script}, .grace = grace, .root = root});
    errors_ = testing::internal::GetCapturedStderr();
    return code;
  }

  std::string file(const std::string& name) const {
    std::ifstream in(folder_ / name);
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
  }

  /// Runs the script in a launch group of another process; sends `signals` to that launcher when both ranks are ready.
  int run_and_signal(const std::string& script, std::vector<int> signals) {
    const pid_t launcher = fork();
    if (launcher == 0) {
      _exit(run_launch_group({.processes = 2, .command = {"/bin/sh", "-c", script}, .grace = 300ms}));
    }
    while (!std::filesystem::exists(folder_ / "ready0") || !std::filesystem::exists(folder_ / "ready1")) {
      if (std::chrono::steady_clock::now() - begin_ > kDeadline) break;
      std::this_thread::sleep_for(5ms);
    }
    for (const int signal : signals) {
      kill(launcher, signal);
      std::this_thread::sleep_for(200ms);
    }
    int status = 0;
    // Pending signals of a busy launcher merge into one: if the last has no effect for long, it is sent again. A signal
    // that arrives while the launcher exits, half a second after the others, would kill it.
    auto again = std::chrono::steady_clock::now() + 2s;
    while (waitpid(launcher, &status, WNOHANG) == 0) {
      std::this_thread::sleep_for(10ms);
      if (signals.size() == 1 || std::chrono::steady_clock::now() < again) continue;
      kill(launcher, signals.back());
      again += 2s;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  std::filesystem::path folder_;
  std::string errors_;
  std::chrono::steady_clock::time_point begin_;
};

TEST_F(LaunchGroup, GivesEveryRankItsVariables) {
  unsetenv("OMP_NUM_THREADS");
  EXPECT_EQ(run(3, "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR >$DIR/v$RANK; "
                   "echo $MASTER_PORT >$DIR/p$RANK; test $OMP_NUM_THREADS -ge 1"),
            0);
  EXPECT_EQ(file("v0"), "0 0 3 3 127.0.0.1\n");
  EXPECT_EQ(file("v2"), "2 2 3 3 127.0.0.1\n");
  EXPECT_EQ(file("p0"), file("p2"));
  EXPECT_GT(std::atoi(file("p0").c_str()), 1023);
  EXPECT_EQ(errors_, "");
}

TEST_F(LaunchGroup, EndsWithItsParent) {
  const pid_t parent = fork();
  const auto all_have = [this](const std::string& name) {
    for (const char* rank : {"0", "1"}) {
      while (!std::filesystem::exists(folder_ / (name + rank)) &&
             std::chrono::steady_clock::now() - begin_ < kDeadline)
        std::this_thread::sleep_for(5ms);
    }
  };
  if (parent == 0) {
    const pid_t self = getpid();
    const char* script = "trap 'echo >$DIR/end$RANK; exit' TERM; echo >$DIR/ready$RANK; while :; do sleep 0.02; done";
    if (fork() == 0)
      _exit(run_launch_group({.processes = 2, .command = {"/bin/sh", "-c", script}, .root = "", .parent = self}));
    all_have("ready");
    _exit(0);
  }
  waitpid(parent, nullptr, 0);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "end0"));
  all_have("end");  // or TearDown() says that it took too long
}

TEST_F(LaunchGroup, KeepsTheUsersThreads) {
  setenv("OMP_NUM_THREADS", "7", 1);
  EXPECT_EQ(run(1, "test $OMP_NUM_THREADS = 7"), 0);
  unsetenv("OMP_NUM_THREADS");
}

TEST_F(LaunchGroup, AsksForHugePagesUnlessTheUserSetsTheTunables) {
  unsetenv("GLIBC_TUNABLES");
  EXPECT_EQ(run(1, "test $GLIBC_TUNABLES = glibc.malloc.hugetlb=1"), 0);
  setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0", 1);
  EXPECT_EQ(run(1, "test $GLIBC_TUNABLES = glibc.malloc.hugetlb=0"), 0);
  unsetenv("GLIBC_TUNABLES");
}

TEST_F(LaunchGroup, FirstFailureEndsTheOthersAndIsWhatTheUserSees) {
  EXPECT_EQ(run(3, "if [ $RANK = 1 ]; then echo cause >&2; exit 7; fi; "
                   "trap 'echo consequence >&2; exit 9' TERM; while :; do sleep 0.05; done"),
            7);
  EXPECT_THAT(errors_, HasSubstr("cause\n"));
  EXPECT_THAT(errors_, Not(HasSubstr("consequence")));
}

TEST_F(LaunchGroup, RankThatTellsFirstIsTheCauseEvenIfItExitsLast) {
  EXPECT_EQ(run(2, "if [ $RANK = 1 ]; then eval \"echo 1 >&$MEGASHARD_FAILURE_FD\"; echo cause >&2; "
                   "touch $DIR/told; "
                   "sleep 0.05; exit 3; fi; until [ -e $DIR/told ]; do sleep 0.01; done; "
                   "eval \"echo 0 >&$MEGASHARD_FAILURE_FD\"; echo consequence >&2; exit 4"),
            3);
  EXPECT_THAT(errors_, HasSubstr("cause\n"));
  EXPECT_THAT(errors_, Not(HasSubstr("consequence")));
}

TEST_F(LaunchGroup, RankThatOnlyWaitedForOthersIsNotTheCauseOfTheirFailure) {
  EXPECT_EQ(run(2, "if [ $RANK = 0 ]; then eval \"echo 0 waited >&$MEGASHARD_FAILURE_FD\"; "
                   "echo consequence >&2; touch $DIR/told; exit 4; fi; "
                   "until [ -e $DIR/told ]; do sleep 0.01; done; sleep 0.2; "
                   "eval \"echo 1 >&$MEGASHARD_FAILURE_FD\"; echo cause >&2; exit 3"),
            3);
  EXPECT_THAT(errors_, HasSubstr("cause\n"));
  EXPECT_THAT(errors_, Not(HasSubstr("consequence")));
}

/// Notices the end of each rank, even if many end at the same time.
TEST_F(LaunchGroup, EndsHoweverItsRanksEnd) {
  for (int i = 0; i < 100; ++i) ASSERT_EQ(run(8, "exit 0"), 0);
}

TEST_F(LaunchGroup, SilentFailureGetsAnError) {
  EXPECT_EQ(run(2, "test $RANK = 0 || exit 5"), 5);
  EXPECT_EQ(errors_, "megashard: error: launch: rank 1 ended with exit code 5\n");
}

TEST_F(LaunchGroup, KilledRankIsTheCause) {
  EXPECT_EQ(run(2, "if [ $RANK = 1 ]; then kill -KILL $$; fi; while :; do sleep 0.05; done"), 128 + SIGKILL);
  EXPECT_THAT(errors_, HasSubstr("rank 1 was ended by signal 9 (Killed)"));
  EXPECT_THAT(errors_, Not(HasSubstr("memory"))) << "the kernel does not say so";
}

TEST_F(LaunchGroup, AKilledRankHadTooMuchMemoryWhereTheKernelHasCountedIt) {
  const auto counted = [this](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((folder_ / path).parent_path());
    std::ofstream(folder_ / path) << text;
  };
  const std::string dies = "; kill -KILL $$";
  counted("proc/vmstat", "pgfault 3\noom_kill 4\n");
  EXPECT_EQ(run(1, "echo 'oom_kill 5' >$DIR/proc/vmstat" + dies, 5s, folder_), 128 + SIGKILL);
  EXPECT_THAT(errors_,
              HasSubstr("rank 0 was ended by signal 9 (Killed): the kernel says that it has ended a process on "
                        "this machine since the start because memory was short, probably this one"));
  counted("proc/self/cgroup", "5:cpu:/a\n0::/job/7\n");
  counted("sys/fs/cgroup/job/7/memory.events", "low 0\noom 9\noom_kill 0\n");
  EXPECT_EQ(run(1, "echo 'oom_kill 1' >$DIR/sys/fs/cgroup/job/7/memory.events" + dies, 5s, folder_), 128 + SIGKILL);
  EXPECT_THAT(errors_, HasSubstr("a process of this control group"));
  counted("proc/self/cgroup", "9:hugetlb,memory:/job\n");  // cgroup version 1, in a container
  counted("sys/fs/cgroup/memory/memory.oom_control", "under_oom 0\noom_kill 2\n");
  EXPECT_EQ(run(1, "echo 'oom_kill 3' >$DIR/sys/fs/cgroup/memory/memory.oom_control" + dies, 5s, folder_),
            128 + SIGKILL);
  EXPECT_THAT(errors_, HasSubstr("a process of this control group"));
  EXPECT_EQ(run(1, "true" + dies, 5s, folder_), 128 + SIGKILL);
  EXPECT_THAT(errors_, Not(HasSubstr("memory")));
}

TEST_F(LaunchGroup, WhoeverIgnoresTheEndIsKilledAfterTheGrace) {
  EXPECT_EQ(run(2, "if [ $RANK = 1 ]; then exit 2; fi; trap '' TERM; while :; do sleep 1; done", 200ms), 2);
}

TEST_F(LaunchGroup, OutputIsPassedOnWhileTheGroupRuns) {
  EXPECT_EQ(run(2, "echo from $RANK >&2"), 0);
  EXPECT_THAT(errors_, HasSubstr("from 0\n"));
  EXPECT_THAT(errors_, HasSubstr("from 1\n"));
}

TEST_F(LaunchGroup, MissingProgramIsAnError) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(run_launch_group({.processes = 1, .command = {"/no/such/program"}}), 127);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("cannot run /no/such/program: No such file"));
}

TEST_F(LaunchGroup, SignalIsPassedOnOnce) {
  EXPECT_EQ(run_and_signal("trap 'echo x >>$DIR/got$RANK; exit 0' USR1; touch $DIR/ready$RANK; "
                           "while :; do sleep 0.05; done",
                           {SIGUSR1}),
            0);
  EXPECT_EQ(file("got0"), "x\n");
  EXPECT_EQ(file("got1"), "x\n");
}

TEST_F(LaunchGroup, TerminationLeavesRanksTheirTime) {
  EXPECT_EQ(run_and_signal("trap 'sleep 1; echo saved >$DIR/s$RANK; exit 0' TERM; touch $DIR/ready$RANK; "
                           "while :; do sleep 0.05; done",
                           {SIGTERM}),
            0);
  EXPECT_EQ(file("s1"), "saved\n");
}

TEST_F(LaunchGroup, RanksThatEndAsTheyAreAskedToAreNoFailure) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(run_and_signal("trap '[ $RANK = 0 ] || sleep 0.2; echo ended $RANK >&2; exit 130' INT; "
                           "touch $DIR/ready$RANK; while :; do sleep 0.05; done",
                           {SIGINT}),
            128 + SIGINT);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "ended 0\nended 1\n");
}

TEST_F(LaunchGroup, SecondInterruptEndsTheGroup) {
  EXPECT_EQ(run_and_signal("trap '' INT TERM; touch $DIR/ready$RANK; while :; do sleep 0.05; done", {SIGINT, SIGINT}),
            128 + SIGINT);
}

TEST_F(LaunchGroup, RanksDieWithTheLauncher) {
  EXPECT_EQ(run_and_signal("echo $$ >$DIR/pid$RANK; touch $DIR/ready$RANK; while :; do sleep 0.05; done", {SIGKILL}),
            -SIGKILL);
  const auto gone = [&](const char* name) {
    const pid_t pid = std::atoi(file(name).c_str());
    for (int attempt = 0; attempt < 200 && kill(pid, 0) == 0; ++attempt) std::this_thread::sleep_for(10ms);
    // Without an init process that reaps orphans it remains a zombie.
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name_field, state;
    return kill(pid, 0) != 0 || (stat >> number >> name_field >> state && state == "Z");
  };
  EXPECT_TRUE(gone("pid0"));
  EXPECT_TRUE(gone("pid1"));
}

TEST(ReservePort, TakenPortIsAnError) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  const int reuse = 1;
  ASSERT_EQ(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse), 0);
  const ReservedPort reserved = reserve_port(0);
  const int port = reserved.port;
  address.sin_port = htons(static_cast<uint16_t>(port));
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  try {
    reserve_port(port);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(), HasSubstr("port " + std::to_string(port)));
    EXPECT_THAT(error.what(), HasSubstr("choose another, or leave --master-port out"));
  }
  close(listener);
  EXPECT_EQ(reserve_port(port).port, port);
}

}  // namespace
}  // namespace megashard
