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

#include <filesystem>
#include <stdexcept>
#include <thread>

#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

/// A socket that listens on a port of its own on loopback.
class TakenPort {
 public:
  TakenPort() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    EXPECT_EQ(::bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(socket_, 1), 0);
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
  return {.world_size = 2,
          .local_world_size = 2,
          .init_method = init_method,
          .timeout = std::chrono::seconds(10)};
}

const std::vector<std::string> kBothFine(2, "the ranks met");

/// Starts both ranks as threads and sums their numbers; returns the messages of what they threw,
/// which is kBothFine at the end.
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
  options.local_world_size =
      0;  // as on several machines: the address of the host's name, or loopback
  EXPECT_EQ(meet(options), kBothFine);
}

TEST(Rendezvous, OverAFileThatIsUsedOnce) {
  const auto path =
      std::filesystem::temp_directory_path() / ("rendezvous_test_" + std::to_string(::getpid()));
  EXPECT_EQ(meet(two_ranks("file://" + path.string())), kBothFine);
  std::filesystem::remove(path);
}

TEST(Rendezvous, OneRankNeedsNobody) {
  const ProcessGroupPtr world = init_process_group({.init_method = "env://"});
  EXPECT_EQ(world->size(), 1);
  world->barrier();
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

TEST(Rendezvous, MasterOutOfReach) {
  RendezvousOptions options = two_ranks("tcp://127.0.0.1:" + std::to_string(free_port()));
  options.rank = 1;
  options.timeout = std::chrono::milliseconds(500);
  EXPECT_THAT(
      message_of([&] { init_process_group(options); }),
      AllOf(HasSubstr("rank 1 of 2 cannot reach rank 0 at 127.0.0.1:"), HasSubstr("MASTER_ADDR")));
}

TEST(Rendezvous, RankThatNeverComes) {
  RendezvousOptions options = two_ranks("tcp://127.0.0.1:" + std::to_string(free_port()));
  options.timeout = std::chrono::milliseconds(500);
  EXPECT_THAT(
      message_of([&] { init_process_group(options); }),
      AllOf(HasSubstr("connecting to the other ranks in group 'world' failed on rank 0 of 2"),
            HasSubstr("--distributed-timeout-minutes")));
}

TEST(Rendezvous, RanksThatDisagree) {
  RendezvousOptions first = two_ranks("tcp://127.0.0.1:" + std::to_string(free_port()));
  first.timeout = std::chrono::seconds(1);
  RendezvousOptions second = first;
  second.rank = 1;
  second.world_size = 3;
  EXPECT_THAT(meet(first, second)[1],
              HasSubstr("rank 1 was started for a world of 3, rank 0 for one of 2: give every "
                        "rank the same WORLD_SIZE"));
}

TEST(Rendezvous, WrongOptionsAreNamed) {
  const auto message = [](RendezvousOptions options) {
    return message_of([&] { init_process_group(options); });
  };
  EXPECT_THAT(message({.rank = 2, .world_size = 2}),
              HasSubstr("rank 2 of a world of 2 does not exist"));
  EXPECT_THAT(message({.backend = "mpi"}),
              HasSubstr("unknown backend 'mpi'; take gloo, nccl or cpu:gloo,cuda:nccl"));
  EXPECT_THAT(message({.world_size = 2}), HasSubstr("env:// needs MASTER_ADDR and MASTER_PORT"));
  EXPECT_THAT(message(two_ranks("tcp://host")), HasSubstr("should read tcp://HOST:PORT"));
  EXPECT_THAT(message(two_ranks("tcp://host:12x")), HasSubstr("'12x' is no port"));
  EXPECT_THAT(message(two_ranks("tcp://host:70000")),
              HasSubstr("port 70000 of the master is not between"));
  EXPECT_THAT(message(two_ranks("udp://host:1")), HasSubstr("unknown init method 'udp://host:1'"));
  EXPECT_THAT(message(two_ranks("file://relative")), HasSubstr("absolute path"));
  EXPECT_THAT(message(two_ranks("file:///no_such_folder/store")),
              HasSubstr("folder /no_such_folder does not exist"));
}

}  // namespace
}  // namespace megashard
