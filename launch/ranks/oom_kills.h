#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace megashard {

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
