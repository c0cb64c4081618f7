#include "launch/train/run_signals.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>

#include "framework/arguments/argument_table.h"

namespace megashard {
namespace {

// Used by the signal handler.
std::atomic<const char*> last_words = nullptr;  // null: the first interrupt is only recorded
std::atomic<bool> says_them = false;
std::atomic<int> exit_signal = 0;
std::atomic<bool> exit_asked = false, interrupt_asked = false;

constexpr const char* kTwice =
    "megashard: interrupted twice: the run ends at once, and what was being saved does not count\n";

void on_signal(int signal) {
  const char* words = last_words;
  const bool is_exit = signal == exit_signal && (signal != SIGINT || words == nullptr);
  auto& asked = is_exit ? exit_asked : interrupt_asked;
  if (is_exit || words == nullptr) {
    if (!asked.exchange(true) || signal != SIGINT) return;
    words = kTwice;
  }
  if (says_them && write(STDERR_FILENO, words, std::strlen(words)) < 0) _exit(kExitInterrupted);
  _exit(kExitInterrupted);
}

}  // namespace

void watch_signals(const Arguments& arguments, const char* message, bool speaks, const DiagnosticSink& sink) {
  says_them = speaks;
  last_words = message;
  if (arguments.exit_signal_handler) {
    exit_signal = static_cast<int>(arguments.exit_signal);
    std::signal(exit_signal, on_signal);
  } else if (arguments.is_given("exit_signal")) {
    sink(Severity::kWarning, "--exit-signal " + choice_name("exit_signal", arguments.exit_signal) +
                                 " needs --exit-signal-handler; without it the signal ends the run "
                                 "and saves nothing.");
  }
  if (std::signal(SIGINT, on_signal) == SIG_IGN && exit_signal != SIGINT) std::signal(SIGINT, SIG_IGN);
}

void end_at_interrupt(const char* message) { last_words = message; }

void finish_step_at_interrupt() { last_words = nullptr; }

StopRequest stop_request() {
  if (interrupt_asked) return StopRequest::kInterrupt;
  return exit_asked ? StopRequest::kExit : StopRequest::kNone;
}

}  // namespace megashard
