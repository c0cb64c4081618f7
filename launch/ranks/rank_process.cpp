#include "launch/ranks/rank_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <utility>

#include "launch/ranks/failure.h"

extern char** environ;

namespace megashard {

Descriptor::Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void Descriptor::reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("cannot make a pipe");
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

void throw_errno(const std::string& what) { throw std::runtime_error("launch: " + what + ": " + std::strerror(errno)); }

namespace {

constexpr int kCannotExecute = 127;

/// This process's environment, changed by `changes` ("NAME=value").
std::vector<std::string> environment_with(const std::vector<std::string>& changes) {
  std::vector<std::string> result = changes;
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string entry = *each;
    const std::string name = entry.substr(0, entry.find('=') + 1);
    const bool changed = std::any_of(changes.begin(), changes.end(), [&](const std::string& change) {
      return change.compare(0, name.size(), name) == 0;
    });
    if (!changed) result.push_back(entry);
  }
  return result;
}

std::vector<char*> c_strings(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (std::string& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

RankProcess start_rank(RankProcessOptions options) {
  std::vector<std::string> variables = environment_with(options.variables);
  const std::vector<char*> envp = c_strings(variables);
  const std::vector<char*> argv = c_strings(options.command);
  Pipe errors = make_pipe();
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) throw_errno("cannot start rank " + std::to_string(options.rank));
  if (pid == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(kCannotExecute);
    dup2(errors.write.get(), STDERR_FILENO);
    fcntl(options.inherited, F_SETFD, 0);
    sigprocmask(SIG_SETMASK, &options.signal_mask, nullptr);
    execvpe(argv[0], argv.data(), envp.data());
    dprintf(STDERR_FILENO, "%slaunch: cannot run %s: %s\n", kErrorPrefix, argv[0], std::strerror(errno));
    _exit(kCannotExecute);
  }
  setpgid(pid, pid);  // also in the parent, to avoid a race
  return {pid, std::move(errors.read), "", true};
}

namespace {

/// The number in a line "NAME NUMBER".
std::optional<int64_t> counted_in(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  int64_t count = 0;
  for (std::string word; file >> word;) {
    if (word == name && file >> count) return count;
  }
  return std::nullopt;
}

/// The count of a control group of version 2 ("0::/PATH") or 1 ("5:memory:/PATH"). In a container its own group is the
/// root.
std::optional<int64_t> counted_in_group(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == line.npos) continue;
    const auto controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_second_version = controllers == ",,";
    if (!is_second_version && controllers.find(",memory,") == controllers.npos) continue;
    const auto base = root + "/sys/fs/cgroup" + (is_second_version ? "" : "/memory");
    const std::string file = is_second_version ? "/memory.events" : "/memory.oom_control";
    for (const auto& folder : {base + line.substr(second + 1), base}) {
      if (const auto count = counted_in(folder + file, "oom_kill")) return count;
    }
  }
  return std::nullopt;
}

bool has_risen(const std::optional<int64_t>& before, const std::optional<int64_t>& after) {
  return before && after && *after > *before;
}

}  // namespace

OomKills count_oom_kills(const std::string& root) {
  return {.in_group = counted_in_group(root), .on_machine = counted_in(root + "/proc/vmstat", "oom_kill")};
}

std::string told_of_oom(const OomKills& before, const OomKills& after) {
  const bool in_group = has_risen(before.in_group, after.in_group);
  if (!in_group && !has_risen(before.on_machine, after.on_machine)) return "";
  return std::string(": the kernel says that it has ended a process ") +
         (in_group ? "of this control group" : "on this machine") +
         " since the start because memory was short, probably this one: use fewer ranks or a smaller model";
}

}  // namespace megashard
