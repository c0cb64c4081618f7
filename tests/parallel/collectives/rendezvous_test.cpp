#include "parallel/collectives/rendezvous.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "tests/support/message_of.h"
#include "tests/support/refuse_threads.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

/// A socket on a port that nobody else can take.
class TakenPort {
 public:
  explicit TakenPort(bool listens = true) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    EXPECT_EQ(::bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    if (listens) {
      EXPECT_EQ(::listen(socket_, 1), 0);
    }
    socklen_t length = sizeof(address);
    EXPECT_EQ(::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
  }
  ~TakenPort() { ::close(socket_); }
  int port() const { return port_; }

 private:
  int socket_;
  int port_ = 0;
};

int free_port() { return TakenPort().port(); }

RendezvousOptions two_ranks(const std::string& init_method) {
  return {.world_size = 2, .local_world_size = 2, .init_method = init_method, .timeout = std::chrono::seconds(10)};
}

const std::vector<std::string> kBothFine(2, "the ranks met");

/// Starts both ranks as threads and sums their numbers; returns the messages they threw, or kBothFine.
std::vector<std::string> meet(const RendezvousOptions& first, const RendezvousOptions& second) {
  std::vector<std::string> messages(2);
  const auto start = [&messages](size_t i, const RendezvousOptions& options) {
    return std::thread([&messages, i, options] {
      messages[i] = message_of([&] {
        const ProcessGroupPtr world = init_process_group(options);
        at::Tensor tensor = at::full({1}, options.rank + 1.0, at::kFloat);
        world->all_reduce(tensor, ReduceOp::kSum).wait();
        EXPECT_EQ(tensor.item<float>(), 3);
        world->barrier();
        throw std::runtime_error(kBothFine[0]);
      });
    });
  };
  std::thread one = start(0, first);
  std::thread two = start(1, second);
  one.join();
  two.join();
  return messages;
}

std::vector<std::string> meet(RendezvousOptions options) {
  RendezvousOptions second = options;
  second.rank = second.local_rank = 1;
  return meet(options, second);
}

TEST(Rendezvous, OverTcpAndEnvironment) {
  EXPECT_EQ(meet(two_ranks("tcp://127.0.0.1:" + std::to_string(free_port()))), kBothFine);
  RendezvousOptions options = two_ranks("env://");
  options.master_addr = "localhost";
  options.master_port = free_port();
  options.local_world_size = 0;  // as on several machines
  EXPECT_EQ(meet(options), kBothFine);
}

TEST(Rendezvous, OverIpv6) {
  const int taken = ::socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 own{};
  own.sin6_family = AF_INET6;
  own.sin6_addr = in6addr_loopback;
  const bool there = taken >= 0 && ::bind(taken, reinterpret_cast<const sockaddr*>(&own), sizeof(own)) == 0;
  ::close(taken);
  if (!there) GTEST_SKIP() << "this machine has no IPv6";
  RendezvousOptions options = two_ranks("tcp://[::1]:" + std::to_string(free_port()));
  options.local_world_size = 0;
  EXPECT_EQ(meet(options), kBothFine);
}

TEST(Rendezvous, OverAFileThatIsUsedOnce) {
  const auto path = std::filesystem::temp_directory_path() / ("rendezvous_test_" + std::to_string(::getpid()));
  EXPECT_EQ(meet(two_ranks("file://" + path.string())), kBothFine);
  std::filesystem::remove(path);
}

TEST(Rendezvous, OneRankNeedsNobody) {
  const ProcessGroupPtr world = init_process_group({.init_method = "env://"});
  EXPECT_EQ(world->size(), 1);
  world->barrier();
}

TEST(Rendezvous, LocalRanksMayBeMoreThanTheGpusThatEachSees) {
  if (!testing::on_simulated_device()) GTEST_SKIP() << "needs GPUs";
  const int gpus = testing::simulated_cuda().device_count();
  RendezvousOptions first = two_ranks("tcp://127.0.0.1:" + std::to_string(free_port()));
  first.backend = "nccl";
  first.local_rank = gpus;
  RendezvousOptions second = first;
  second.rank = 1;
  second.local_rank = gpus + 1;
  EXPECT_EQ(meet(first, second), kBothFine);

  second.local_rank = 0;
  first.init_method = second.init_method = "tcp://127.0.0.1:" + std::to_string(free_port());
  for (const auto& message : meet(first, second))
    EXPECT_THAT(message, HasSubstr("has the GPU of another rank: start at most as many ranks"));
}

void handle_nothing(int) {}

TEST(Rendezvous, AConnectionThatBreaksIsNoSignal) {
  const auto handler_after = [](sighandler_t before) {
    ::signal(SIGPIPE, before);
    init_process_group({.init_method = "env://"});
    return ::signal(SIGPIPE, SIG_IGN);
  };
  EXPECT_EQ(handler_after(SIG_DFL), SIG_IGN);
  EXPECT_EQ(handler_after(handle_nothing), handle_nothing);
}

TEST(Rendezvous, PortInUse) {
  const TakenPort taken;
  const std::string port = std::to_string(taken.port());
  EXPECT_EQ(message_of([&] { init_process_group(two_ranks("tcp://127.0.0.1:" + port)); }),
            "rank 0 cannot listen on port " + port +
                ": it is in use by another program or by an earlier run that has not ended; take "
                "another one "
                "(--master-port or MASTER_PORT)");
}

/// Output of one rank that waits in vain: its first and last line, and its message at the deadline.
std::vector<std::string> wait_in_vain(RendezvousOptions options) {
  std::vector<std::string> lines;
  options.timeout = std::chrono::milliseconds(1400);
  options.notice = [&lines](const std::string& line) { lines.push_back(line); };
  options.first_notice = std::chrono::milliseconds(300);
  const auto start = std::chrono::steady_clock::now();
  const std::string message = message_of([&] { init_process_group(options); });
  const auto waited = std::chrono::steady_clock::now() - start;
  EXPECT_GE(waited, options.timeout);
  EXPECT_LT(waited, options.timeout + std::chrono::seconds(1));
  EXPECT_GE(lines.size(), 3u) << "after 0.3, 0.6 and 1.2 s";
  return {lines.front(), lines.back(), message};
}

TEST(Rendezvous, MasterOutOfReach) {
  const TakenPort quiet(/*listens=*/false);
  RendezvousOptions options = two_ranks("tcp://127.0.0.1:" + std::to_string(quiet.port()));
  options.rank = 1;
  const std::string place = options.init_method.substr(6);
  const auto nobody = wait_in_vain(options);
  EXPECT_THAT(nobody[0],
              AllOf(HasSubstr("Waiting for rank 0 at " + place + " ("), HasSubstr(" s): nobody listens there")));
  EXPECT_THAT(nobody[2], AllOf(HasSubstr("rank 1 of 2 cannot reach rank 0 at " + place + " after "),
                               HasSubstr(" s: nobody listens there; start rank 0, and check address "
                                         "and port (MASTER_ADDR, MASTER_PORT)")));
}

TEST(Rendezvous, MasterWithoutAName) {
  RendezvousOptions options = two_ranks("tcp://no-such-host.invalid:29500");
  for (options.rank = 0; options.rank < 2; ++options.rank) {
    const auto unknown = wait_in_vain(options);
    EXPECT_THAT(unknown[0], HasSubstr("Waiting for rank 0 at no-such-host.invalid:29500 ("));
    EXPECT_THAT(unknown[2], AllOf(HasSubstr("cannot reach rank 0 at no-such-host.invalid:29500 after "),
                                  HasSubstr(": the name "), HasSubstr("MASTER_ADDR")));
  }
}

TEST(Rendezvous, MasterThatDoesNotAnswer) {
  const TakenPort taken;  // accepts connections but never answers
  RendezvousOptions options = two_ranks("tcp://127.0.0.1:" + std::to_string(taken.port()));
  options.rank = 1;
  const auto silent = wait_in_vain(options);
  for (const auto& each : silent)
    EXPECT_THAT(each, HasSubstr(": something listens there, but does not answer as rank 0 does"));
}

TEST(Rendezvous, RanksThatNeverCome) {
  RendezvousOptions options = two_ranks("tcp://127.0.0.1:" + std::to_string(free_port()));
  const auto one = wait_in_vain(options);
  EXPECT_THAT(one[1], HasSubstr("Waiting for rank 1 of 2 ("));
  EXPECT_THAT(one[2],
              AllOf(HasSubstr(" s for rank 1, which did not come to"), HasSubstr("--distributed-timeout-minutes")));
  options.world_size = 9;
  EXPECT_THAT(wait_in_vain(options)[2], HasSubstr(" s for ranks 1, 2, 3, 4 and 4 more, which did not come"));
}

TEST(Rendezvous, EveryRankNamesThoseThatNeverCome) {
  RendezvousOptions first = two_ranks("tcp://127.0.0.1:" + std::to_string(free_port()));
  first.world_size = first.local_world_size = 4;
  first.timeout = std::chrono::milliseconds(1400);
  RendezvousOptions second = first;
  second.rank = second.local_rank = 3;
  for (const auto& message : meet(first, second))
    EXPECT_THAT(message, HasSubstr(" s for ranks 1, 2, which did not come"));
}

/// Addresses on which this process listens on the port, in the kernel's notation: "0100007F" is 127.0.0.1.
std::vector<std::string> listening_addresses(int port) {
  char in_hex[8];
  std::snprintf(in_hex, sizeof in_hex, ":%04X", port);
  std::vector<std::string> found;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state;
      words >> number >> local >> remote >> state;
      if (local.ends_with(in_hex) && state == "0A") found.push_back(local.substr(0, local.find(':')));
    }
  }
  return found;
}

TEST(Rendezvous, TheStoreListensWhereTheRanksAre) {
  struct Case {
    const char* host;
    int local_world_size;
    std::string listens;
  };
  for (const auto& each :
       {Case{"127.0.0.1", 2, "0100007F"}, Case{"127.0.0.1", 0, "0100007F"}, Case{"localhost", 2, "0100007F"},
        Case{"127.0.0.2", 0, "0200007F"}, Case{"127.0.0.2", 2, "0100007F"}}) {
    const int port = free_port();
    RendezvousOptions options = two_ranks("tcp://" + std::string(each.host) + ":" + std::to_string(port));
    options.local_world_size = each.local_world_size;
    std::thread other([second = options]() mutable {
      second.rank = second.local_rank = 1;
      init_process_group(second)->barrier();
    });
    const ProcessGroupPtr world = init_process_group(options);
    EXPECT_THAT(listening_addresses(port), ::testing::ElementsAre(each.listens)) << each.host;
    world->barrier();
    other.join();
  }
}

TEST(RendezvousDeathTest, ARankThatMayStartNoThreadSaysSoAtOnce) {
  RendezvousOptions options = two_ranks("tcp://127.0.0.1:" + std::to_string(free_port()));
  options.rank = 1;
  EXPECT_EXIT(
      {
        testing::refuse_threads();
        std::fputs(message_of([&] { init_process_group(options); }).c_str(), stderr);
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), "rank 1 has no memory, or may start no thread, to connect to the other ranks");
}

TEST(Rendezvous, AFileWithoutRank0) {
  const auto path = std::filesystem::temp_directory_path() / ("rendezvous_alone_" + std::to_string(::getpid()));
  RendezvousOptions options = two_ranks("file://" + path.string());
  options.rank = 1;
  const auto alone = wait_in_vain(options);
  EXPECT_THAT(alone[0], HasSubstr("Waiting for rank 0 at file://" + path.string() + " ("));
  EXPECT_THAT(alone[2], HasSubstr(" s for rank 0 to come to file://"));
  std::filesystem::remove(path);
}

TEST(Rendezvous, RanksThatDisagree) {
  RendezvousOptions first = two_ranks("tcp://127.0.0.1:" + std::to_string(free_port()));
  first.timeout = std::chrono::seconds(1);
  RendezvousOptions second = first;
  second.rank = 1;
  second.world_size = 3;
  for (const auto& message : meet(first, second)) {  // rank 0 does not wait until the deadline
    EXPECT_EQ(message, "rank 1 was started for a world of 3, rank 0 for one of 2: give every rank the same "
                       "WORLD_SIZE");
  }
}

TEST(Rendezvous, TwoProcessesOfOneRank) {
  RendezvousOptions first = two_ranks("tcp://127.0.0.1:" + std::to_string(free_port()));
  first.world_size = 3;
  RendezvousOptions second = first;
  second.rank = 1;
  std::string third;
  std::thread twin([&] { third = message_of([&] { init_process_group(second); }); });
  const auto messages = meet(first, second);
  twin.join();
  for (const auto& message : {messages[0], messages[1], third}) {
    EXPECT_EQ(message, "two processes are rank 1: give each its own RANK, and each job its own port");
  }
}

TEST(Rendezvous, WrongOptionsAreNamed) {
  const auto message = [](RendezvousOptions options) { return message_of([&] { init_process_group(options); }); };
  EXPECT_THAT(message({.rank = 2, .world_size = 2}), HasSubstr("rank 2 of a world of 2 does not exist"));
  EXPECT_THAT(message({.backend = "mpi"}), HasSubstr("unknown backend 'mpi'; take gloo, nccl or cpu:gloo,cuda:nccl"));
  EXPECT_THAT(message({.world_size = 2}), HasSubstr("env:// needs MASTER_ADDR and MASTER_PORT"));
  EXPECT_THAT(message(two_ranks("tcp://host")), HasSubstr("should read tcp://HOST:PORT"));
  EXPECT_THAT(message(two_ranks("tcp://host:12x")), HasSubstr("'12x' is no port"));
  EXPECT_THAT(message(two_ranks("tcp://host:70000")), HasSubstr("port 70000 of the master is not between"));
  EXPECT_THAT(message(two_ranks("udp://host:1")), HasSubstr("unknown init method 'udp://host:1'"));
  EXPECT_THAT(message(two_ranks("file://relative")), HasSubstr("absolute path"));
  EXPECT_THAT(message(two_ranks("file:///tmp")), HasSubstr("file:///tmp"));
  EXPECT_THAT(message(two_ranks("file:///no_such_folder/store")), HasSubstr("folder /no_such_folder does not exist"));
}

}  // namespace
}  // namespace megashard
