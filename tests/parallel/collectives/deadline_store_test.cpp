#include "parallel/collectives/deadline_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/group_store.h"
#include "parallel/collectives/rendezvous.h"
#include "tests/support/message_of.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using Milliseconds = std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Value = DeadlineStore::Value;

StorePtr with_deadline(const StorePtr& store, Milliseconds left) {
  return c10::make_intrusive<DeadlineStore>(store, [left] { return left; });
}

/// A process that serves a TCPStore. While it is frozen, clients see it as a machine whose network is gone.
class StoreProcess {
 public:
  StoreProcess() {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    process_ = ::fork();
    if (process_ == 0) {
      const auto store = open(0, /*serves=*/true);
      const int port = store->getPort();
      if (::write(ends[1], &port, sizeof(port)) == sizeof(port)) ::pause();
      ::_exit(1);
    }
    EXPECT_EQ(::read(ends[0], &port_, sizeof(port_)), static_cast<ssize_t>(sizeof(port_)));
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~StoreProcess() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  StoreProcess(const StoreProcess&) = delete;
  StoreProcess& operator=(const StoreProcess&) = delete;

  std::string place() const { return "127.0.0.1:" + std::to_string(port_); }
  c10::intrusive_ptr<c10d::TCPStore> client() const { return open(port_, /*serves=*/false); }
  void freeze() const {
    ::kill(process_, SIGSTOP);
    siginfo_t stopped{};
    ::waitid(P_PID, static_cast<id_t>(process_), &stopped, WSTOPPED | WNOWAIT);
  }
  void thaw() const {
    ::kill(process_, SIGCONT);
    client()->check({"key"});  // answered after all abandoned calls
  }

 private:
  static c10::intrusive_ptr<c10d::TCPStore> open(int port, bool serves) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = serves;
    options.waitWorkers = false;
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }

  pid_t process_ = 0;
  int port_ = 0;
};

class DeadlineStoreTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = std::make_unique<StoreProcess>(); }  // before threads are abandoned
  static void TearDownTestSuite() { server_.reset(); }
  void TearDown() override { server_->thaw(); }

  static inline std::unique_ptr<StoreProcess> server_;
};

/// Message thrown by `call`, which must end in time.
std::string message_at(Milliseconds timeout, const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  const std::string message = message_of(call);
  const auto waited = std::chrono::steady_clock::now() - start;
  EXPECT_GE(waited, timeout);
  EXPECT_LT(waited, timeout + Milliseconds(4000)) << message;
  return message;
}

TEST_F(DeadlineStoreTest, AnswersAsTheStoreBehindItDoes) {
  const StorePtr inner = c10::make_intrusive<c10d::HashStore>();
  const StorePtr store = with_deadline(inner, Milliseconds(20'000));
  const Value one{1}, two{2};
  store->set("key", one);
  EXPECT_EQ(inner->get("key"), one);
  EXPECT_EQ(store->compareSet("key", one, two), two);
  EXPECT_EQ(store->get("key"), two);
  EXPECT_EQ(store->add("count", 3), 3);
  EXPECT_TRUE(store->check({"key", "count"}));
  EXPECT_FALSE(store->check({"other"}));
  EXPECT_TRUE(store->deleteKey("count"));
  EXPECT_EQ(store->getNumKeys(), inner->getNumKeys());
  EXPECT_EQ(store->hasExtendedApi(), inner->hasExtendedApi());
  store->append("key", one);
  store->multiSet({"a", "b"}, {one, two});
  EXPECT_EQ(store->clone()->multiGet({"key", "a", "b"}), (std::vector<Value>{{2, 1}, one, two}));
  store->wait({"key"});
  store->wait({"key"}, Milliseconds(1));
  store->setTimeout(Milliseconds(50));
  EXPECT_EQ(inner->getTimeout(), Milliseconds(50));
  EXPECT_EQ(store->getTimeout(), Milliseconds(50));
  EXPECT_EQ(message_of([&] { store->get("nobody's"); }), message_of([&] { inner->get("nobody's"); }));
}

TEST_F(DeadlineStoreTest, LeavesNobodyBehindWhoHasHisAnswer) {
  const StorePtr inner = c10::make_intrusive<c10d::HashStore>();
  const StorePtr store = with_deadline(inner, Milliseconds(20'000));
  for (int call = 0; call < 1000; ++call) {
    store->check({"key"});
    ASSERT_EQ(inner.use_count(), 2u) << "a server whose store is given up would still listen";
  }
}

TEST_F(DeadlineStoreTest, EndsACallThatGetsNoAnswer) {
  const StorePtr store = c10::make_intrusive<c10d::PrefixStore>("group", server_->client());
  server_->freeze();
  const std::string message =
      message_at(Milliseconds(1000), [&] { with_deadline(store, Milliseconds(0))->check({"key"}); });
  EXPECT_THAT(message, AllOf(HasSubstr("the store at " + server_->place() + " gave no answer for "),
                             HasSubstr(" s: check the network to it, and that its process runs")));
}

TEST_F(DeadlineStoreTest, EndsTheConnectingOfAGroup) {
  const auto store = std::make_shared<GroupStore>();
  store->store = server_->client();
  server_->freeze();
  const Milliseconds timeout(300);
  const std::string message = message_at(timeout, [&] {
    make_gloo_group({.store = store, .ranks = {0, 1}, .timeout = timeout});
  });
  EXPECT_THAT(message, AllOf(HasSubstr("connecting to the other ranks in group 'world' failed on rank 0 after"),
                             HasSubstr("[the store at " + server_->place() + " gave no answer for ")));
}

TEST_F(DeadlineStoreTest, EndsTheMeetingOfTheRanks) {
  const std::string place = server_->place();
  const auto freeze = [&](const std::string& line) {
    EXPECT_THAT(line, HasSubstr("Waiting for rank 0 at " + place));
    server_->freeze();
  };
  const RendezvousOptions options{.rank = 1,
                                  .world_size = 2,
                                  .init_method = "tcp://" + place,
                                  .timeout = Milliseconds(1000),
                                  .notice = freeze,
                                  .first_notice = Milliseconds(600)};
  EXPECT_THAT(message_at(options.timeout, [&] { init_process_group(options); }),
              AllOf(HasSubstr("rank 1 of 2 lost " + place + ", where the ranks meet: see whether rank 0 ended"),
                    HasSubstr("[the store at " + place + " gave no answer for")));
}

}  // namespace
}  // namespace megashard
