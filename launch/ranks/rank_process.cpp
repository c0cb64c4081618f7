#include "launch/ranks/rank_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

#include "launch/ranks/failure.h"

extern char** environ;

namespace megashard {
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

}  // namespace megashard
