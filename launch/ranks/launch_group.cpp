#include "launch/ranks/launch_group.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sched.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "launch/ranks/failure.h"
#include "launch/ranks/rank_process.h"

namespace megashard {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
// Wait after a reported failure for news of a killed rank, which is the likelier cause.
constexpr std::chrono::milliseconds kSettle{100};
// Wait after the failure of a rank that only waited for others.
constexpr std::chrono::milliseconds kSettleAfterWait{1000};
// Between looks for the parent. The kernel's signal for its end (PR_SET_PDEATHSIG) would come when the thread ends that
// started this process.
constexpr int kParentPeriodMs = 500;

/// Receives signals through a descriptor while it exists.
class SignalWatch {
 public:
  SignalWatch() {
    sigset_t watched;
    sigemptyset(&watched);
    for (const int signal : kPassedOn) sigaddset(&watched, signal);
    sigaddset(&watched, SIGCHLD);
    std::signal(SIGCHLD, SIG_DFL);  // if the caller ignores SIGCHLD, the kernel would reap the ranks
    sigprocmask(SIG_BLOCK, &watched, &before_);
    fd_ = Descriptor(signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
    if (fd_.get() < 0) throw_errno("cannot watch signals");
  }
  ~SignalWatch() {
    while (next()) {  // signals received during the end are discarded
    }
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  int fd() const { return fd_.get(); }
  const sigset_t& mask_before() const { return before_; }

  std::optional<int> next() {
    signalfd_siginfo info;
    if (read(fd_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
    return static_cast<int>(info.ssi_signo);
  }

 private:
  sigset_t before_;
  Descriptor fd_;
};

int usable_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

class LaunchGroup {
 public:
  explicit LaunchGroup(const LaunchGroupOptions& options) : options_(options), failures_(make_pipe()) {}

  ~LaunchGroup() {
    for (RankProcess& rank : ranks_) {
      if (!rank.running) continue;
      kill(-rank.pid, SIGKILL);
      waitpid(rank.pid, nullptr, 0);
    }
  }

  int run() {
    const ReservedPort reserved = reserve_port(options_.master_port);
    for (int rank = 0; rank < options_.processes; ++rank) start(rank, reserved.port);
    failures_.write.reset();
    while (std::any_of(ranks_.begin(), ranks_.end(), [](const RankProcess& rank) { return rank.running; })) {
      wait_for_news();
      pass_signals();  // before reap(): a SIGCHLD taken after it would be lost
      notice_lost_parent();
      read_errors();
      read_failures();
      reap();
      end_when_due();
      show_errors(/*all=*/false);
    }
    read_errors();
    read_failures();  // of ranks that have reported and ended since
    show_errors(/*all=*/true);
    return exit_code_;
  }

 private:
  void start(int rank, int port) {
    const auto number = [](int value) { return std::to_string(value); };
    std::vector<std::string> changes = {
        "RANK=" + number(rank),
        "LOCAL_RANK=" + number(rank),
        "WORLD_SIZE=" + number(options_.processes),
        "LOCAL_WORLD_SIZE=" + number(options_.processes),
        "MASTER_ADDR=127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE=False",  // rank 0 listens, regardless of this launcher's own launcher
        "MASTER_PORT=" + number(port),
        std::string(kFailureDescriptor) + "=" + number(failures_.write.get())};
    if (std::getenv("OMP_NUM_THREADS") == nullptr) {
      changes.push_back("OMP_NUM_THREADS=" + number(std::max(1, usable_cores() / options_.processes)));
    }
    // Puts the C library's heap in huge pages: the first step touches all of its memory, with one page fault per 4 KiB
    // otherwise.
    if (std::getenv("GLIBC_TUNABLES") == nullptr) changes.push_back("GLIBC_TUNABLES=glibc.malloc.hugetlb=1");
    ranks_.push_back(start_rank({.rank = rank,
                                 .command = options_.command,
                                 .variables = std::move(changes),
                                 .inherited = failures_.write.get(),
                                 .signal_mask = signals_.mask_before()}));
  }

  void wait_for_news() {
    std::vector<pollfd> watched = {{signals_.fd(), POLLIN, 0}, {failures_.read.get(), POLLIN, 0}};
    for (const RankProcess& rank : ranks_) watched.push_back({rank.errors.get(), POLLIN, 0});
    int timeout = options_.parent != 0 ? kParentPeriodMs : -1;  // no limit while no rank has failed
    if (deadline_) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now()).count();
      timeout = static_cast<int>(std::max<int64_t>(0, left));
    }
    poll(watched.data(), watched.size(), timeout);
  }

  /// Reads until the pipe is empty. Resets the descriptor to -1, which poll skips, if the other end is closed.
  static void drain(Descriptor& from, std::string* into) {
    char buffer[4096];
    while (from.get() >= 0) {
      const ssize_t got = read(from.get(), buffer, sizeof buffer);
      if (got > 0) {
        into->append(buffer, static_cast<size_t>(got));
      } else if (got == 0 || errno != EAGAIN) {
        from.reset();
      } else {
        return;
      }
    }
  }

  void read_errors() {
    for (RankProcess& rank : ranks_) drain(rank.errors, &rank.pending);
  }

  void read_failures() {
    drain(failures_.read, &told_);
    for (size_t end; (end = told_.find('\n')) != told_.npos; told_.erase(0, end + 1)) hear(told_.substr(0, end));
  }

  void hear(const std::string& line) {
    int rank = -1;
    std::from_chars(line.data(), line.data() + line.size(), rank);
    const bool only_waited = line.ends_with(kOnlyWaited);
    if (rank < 0 || rank >= options_.processes) return;
    if (culprit_ && (ending_ || only_waited || !culprit_only_waited_)) return;
    culprit_ = rank;
    culprit_only_waited_ = only_waited;
    exit_code_ = kExitFailure;
    deadline_ = Clock::now() + (only_waited ? kSettleAfterWait : kSettle);
  }

  void reap() {
    for (size_t index = 0; index < ranks_.size(); ++index) {
      RankProcess& rank = ranks_[index];
      int status = 0;
      if (!rank.running || waitpid(rank.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) != rank.pid) continue;
      rank.stopped = WIFSTOPPED(status);
      if (rank.stopped && !ending_) {
        tell("rank " + std::to_string(index) + " was stopped by signal " + std::to_string(WSTOPSIG(status)) + " (" +
             strsignal(WSTOPSIG(status)) + "): it goes on at SIGCONT, and the others wait for it meanwhile");
      }
      if (WIFSTOPPED(status) || WIFCONTINUED(status)) continue;
      rank.running = false;
      if (status != 0) note_end(static_cast<int>(index), status);
    }
  }

  void note_end(int rank, int status) {
    const bool killed = WIFSIGNALED(status);
    const bool obeyed = !killed && interrupted_ && WEXITSTATUS(status) == 128 + *interrupted_;
    if (obeyed && !culprit_) {  // requested by the user, like the others' end
      exit_code_ = WEXITSTATUS(status);
      if (!deadline_) deadline_ = Clock::now() + options_.grace;
      return;
    }
    if (culprit_ == rank && !ending_ && !culprit_only_waited_) deadline_ = Clock::now();
    if (culprit_ == rank && !killed) exit_code_ = WEXITSTATUS(status);
    if (ending_ || (culprit_ && (!killed || culprit_was_killed_))) return;
    culprit_ = rank;
    culprit_was_killed_ = killed;
    culprit_only_waited_ = false;
    deadline_ = Clock::now();
    exit_code_ = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (killed && interrupted_ != WTERMSIG(status)) {
      say("rank " + std::to_string(rank) + " was ended by signal " + std::to_string(WTERMSIG(status)) + " (" +
          strsignal(WTERMSIG(status)) + ")" +
          (WTERMSIG(status) == SIGKILL ? told_of_oom(oom_kills_, count_oom_kills(options_.root)) : ""));
    } else if (!killed && ranks_[static_cast<size_t>(rank)].pending.empty()) {
      say("rank " + std::to_string(rank) + " ended with exit code " + std::to_string(exit_code_));
    }
  }

  static void say(const std::string& message) { write_line(kErrorPrefix + ("launch: " + message)); }
  static void tell(const std::string& message) { write_line("megashard: launch: " + message); }
  static void write_line(std::string line) {
    line += '\n';
    std::fwrite(line.data(), 1, line.size(), stderr);
  }

  /// Ends a failed group: SIGTERM to the others, then SIGKILL to all after the grace period. Stopped processes would
  /// not handle SIGTERM.
  void end_when_due() {
    if (!deadline_ || Clock::now() < *deadline_) return;
    for (size_t index = 0; index < ranks_.size(); ++index) {
      if (!ranks_[index].running) continue;
      if (ending_ || ranks_[index].stopped) {
        kill(-ranks_[index].pid, SIGKILL);
      } else if (culprit_ != static_cast<int>(index)) {
        kill(-ranks_[index].pid, SIGTERM);
      }
    }
    deadline_ = Clock::now() + options_.grace;
    ending_ = true;
  }

  /// Shows complete lines: of all ranks while none failed, then of the first failed one.
  void show_errors(bool all) {
    if (culprit_ && !ending_ && !all) return;  // the first failure is not determined yet
    for (size_t index = 0; index < ranks_.size(); ++index) {
      std::string& pending = ranks_[index].pending;
      const size_t end = all || !ranks_[index].running ? pending.size() : pending.rfind('\n') + 1;
      const bool shown = !culprit_ || *culprit_ == static_cast<int>(index) || show_stack();
      if (shown) std::fwrite(pending.data(), 1, end, stderr);
      pending.erase(0, end);
    }
  }

  void pass_signals() {
    while (const auto signal = signals_.next()) {
      if (*signal == SIGCHLD) continue;
      const bool stop = *signal == SIGINT || *signal == SIGTERM;
      if (stop && interrupted_ && !ending_) {
        end_at_once(*signal);
        say("interrupted twice: the ranks end at once, and what was being saved does not count");
      }
      if (stop) interrupted_ = *signal;
      for (const RankProcess& rank : ranks_) {
        if (rank.running) kill(-rank.pid, *signal);
      }
    }
  }

  /// As after a failure of a rank that does not exist.
  void end_at_once(int signal) {
    culprit_ = culprit_.value_or(options_.processes);
    exit_code_ = 128 + signal;
    deadline_ = Clock::now();
  }

  void notice_lost_parent() {
    if (options_.parent == 0 || ending_ || getppid() == options_.parent) return;
    end_at_once(SIGTERM);
    say("the process " + std::to_string(options_.parent) + " that started this training is gone: the ranks end");
  }

  const LaunchGroupOptions& options_;
  const OomKills oom_kills_ = count_oom_kills(options_.root);  // before the ranks started
  SignalWatch signals_;
  Pipe failures_;
  std::vector<RankProcess> ranks_;
  std::optional<int> culprit_;  // the rank that failed first
  bool culprit_was_killed_ = false;
  bool culprit_only_waited_ = false;           // another rank may still report the cause
  std::string told_;                           // partial line read from failures_
  int exit_code_ = 0;                          // of the culprit, or of ranks ended by the user
  std::optional<int> interrupted_;             // the last SIGINT or SIGTERM from the user
  bool ending_ = false;                        // the other ranks have received SIGTERM
  std::optional<Clock::time_point> deadline_;  // of the next escalation
};

}  // namespace

ReservedPort reserve_port(int wanted) {
  Descriptor socket_fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(wanted));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int reuse = 1;  // allows the port of a run that has just ended
  setsockopt(socket_fd.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(socket_fd.get(), generic, size) != 0) {
    const std::string remedy = errno == EADDRINUSE ? "; choose another, or leave --master-port out for a free one" : "";
    throw std::runtime_error("launch: port " + std::to_string(wanted) + " cannot be used: " + std::strerror(errno) +
                             remedy);
  }
  getsockname(socket_fd.get(), generic, &size);
  return {std::move(socket_fd), ntohs(address.sin_port)};
}

int run_launch_group(const LaunchGroupOptions& options) { return LaunchGroup(options).run(); }

}  // namespace megashard
