#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace megashard {

/// How many processes the kernel has ended because memory was short, by its own counts. Unset: it does not tell.
struct OomKills {
  std::optional<int64_t> in_group;    ///< of the control group of this process (a container, a job)
  std::optional<int64_t> on_machine;  ///< since it started
};

/// `root`: the folder that has proc/ and sys/; "" is the machine's own.
OomKills count_oom_kills(const std::string& root = "");

/// What these counts say of a process that was killed between them, behind a colon; empty: nothing.
std::string told_of_oom(const OomKills& before, const OomKills& after);

}  // namespace megashard
