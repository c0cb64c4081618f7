#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// Owns a file descriptor; -1 if none.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { reset(); }
  void reset();
  int get() const { return fd_; }

 private:
  int fd_;
};

/// Closed on exec; reads do not block.
struct Pipe {
  Descriptor read, write;
};

Pipe make_pipe();

/// Throws std::runtime_error with "launch: ", `what`, and the message of errno.
[[noreturn]] void throw_errno(const std::string& what);

/// A process that runs a rank.
struct RankProcess {
  pid_t pid = 0;
  Descriptor errors;    ///< reads the rank's stderr
  std::string pending;  ///< read, but not shown yet
  bool running = true;
  bool stopped = false;  ///< by SIGSTOP or similar
};

struct RankProcessOptions {
  int rank = 0;
  std::vector<std::string> command;    ///< program and arguments
  std::vector<std::string> variables;  ///< "NAME=value", replacing this process's variables
  int inherited = -1;                  ///< a descriptor that the rank keeps open
  sigset_t signal_mask{};
};

/// Starts a rank in its own process group, so that only this process receives Ctrl-C. The rank is killed when this
/// process ends, and reports a missing program on its stderr. Throws std::runtime_error if no process can be created.
RankProcess start_rank(RankProcessOptions options);

/// Number of processes that the kernel has killed for lack of memory. Unset if the kernel does not report it.
struct OomKills {
  std::optional<int64_t> in_group;    ///< in this process's control group (container, job)
  std::optional<int64_t> on_machine;  ///< since boot
};

/// `root` is the folder with proc/ and sys/; "" for the machine's.
OomKills count_oom_kills(const std::string& root = "");

/// Text after a colon about a process killed between these counts; empty if they are equal.
std::string told_of_oom(const OomKills& before, const OomKills& after);

}  // namespace megashard
