#include "launch/ranks/failure.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string_view>
#include <thread>

#include "framework/diagnostics.h"
#include "framework/process_group/launcher_variables.h"

namespace megashard {
namespace {

std::string variable(const char* name) { return own_variable(name).value_or(""); }

/// "3" if there are several ranks, else empty. Unchecked, because it runs after failures.
std::string rank_in_world() {
  const auto* names = find_launcher(own_variable);
  if (names == nullptr || variable(names->world_size) == "1") return "";
  return variable(names->rank);
}

bool first_of_host() {
  const auto* names = find_launcher(own_variable);
  const auto local_rank = names == nullptr ? "" : variable(names->local_rank);
  return local_rank.empty() || local_rank == "0";
}

void tell_launcher(const std::string& rank, bool only_waited) {
  const std::string line = (rank.empty() ? "0" : rank) + (only_waited ? kOnlyWaited : "") + "\n";
  // If the launcher is gone, it has already ended this process.
  if (write(std::atoi(variable(kFailureDescriptor).c_str()), line.data(), line.size()) < 0) return;
}

int fail(const std::string& message, int exit_code, bool of_one_rank, bool only_waited = false) {
  const std::string rank = rank_in_world();
  if (!variable(kFailureDescriptor).empty()) tell_launcher(rank, only_waited);
  // Some messages that compare failures name the rank themselves.
  const bool name_rank = of_one_rank && !rank.empty() && !message.starts_with("rank ");
  const std::string line = kErrorPrefix + (name_rank ? "rank " + rank + ": " : "") + message + "\n";
  std::fflush(stdout);
  std::fwrite(line.data(), 1, line.size(), stderr);
  return exit_code;
}

int fail_as_all_ranks(const std::string& message, std::chrono::milliseconds patience) {
  const bool is_said_elsewhere = variable(kFailureDescriptor).empty() && !first_of_host();
  if (is_said_elsewhere) std::this_thread::sleep_for(patience);
  return fail(message, kExitUsage, is_said_elsewhere);
}

std::string out_of_memory(const std::string& detail) {
  return "out of memory" + (detail.empty() ? "" : " " + detail) +
         ": take a smaller --micro-batch-size or --seq-length, share sequences by "
         "--context-parallel-size, recompute by --recompute-granularity, or use fewer ranks on "
         "this machine";
}

}  // namespace

bool show_stack() { return variable(kStackVariable) == "1"; }

std::string error_message(const std::exception& error) {
  std::string text = error.what();
  if (!show_stack()) text.resize(std::min(text.size(), text.find("\nException raised from ")));
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  if (text.empty()) return "failed without a message";
  // messages of LibTorch's allocators
  const bool full = text.find("can't allocate memory") != text.npos || text.find("CUDA out of memory") != text.npos ||
                    text.find("std::bad_alloc") != text.npos;
  return full ? out_of_memory("(" + text + ")") : text;
}

void (*end_in_signal_handler())(const char* message) {
  static const std::string rank = rank_in_world();
  static const std::string told = (rank.empty() ? "0" : rank) + "\n";
  static const std::string prefix = kErrorPrefix + (rank.empty() ? "" : "rank " + rank + ": ");
  static const std::string descriptor = variable(kFailureDescriptor);
  static const int launcher = descriptor.empty() ? -1 : std::atoi(descriptor.c_str());
  return [](const char* message) {
    if (launcher >= 0 && write(launcher, told.data(), told.size()) < 0) _exit(kExitFailure);
    for (const std::string_view part : {std::string_view(prefix), std::string_view(message), std::string_view("\n")}) {
      if (write(STDERR_FILENO, part.data(), part.size()) < 0) break;
    }
    _exit(kExitFailure);
  };
}

void end_at_terminate() {
  if (show_stack()) return;
  std::set_terminate([] {
    try {
      if (std::current_exception() == nullptr) std::abort();
      std::rethrow_exception(std::current_exception());
    } catch (const std::bad_alloc&) {
      _exit(fail(out_of_memory(""), kExitFailure, true));
    } catch (const std::exception& error) {
      _exit(fail(error_message(error), kExitFailure, true));
    }
  });
}

int run_program(const std::function<int()>& program, std::chrono::milliseconds patience) {
  try {
    return program();
  } catch (const OwnUsageError& error) {
    return fail(error_message(error), kExitUsage, true);
  } catch (const UsageError& error) {
    return fail_as_all_ranks(error_message(error), patience);
  } catch (const PeerLostError& error) {
    return fail(error_message(error), kExitFailure, true, /*only_waited=*/true);
  } catch (const std::bad_alloc&) {
    return fail(out_of_memory(""), kExitFailure, true);
  } catch (const std::exception& error) {
    return fail(error_message(error), kExitFailure, true);
  }
}

}  // namespace megashard
