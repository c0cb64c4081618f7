#include "launch/ranks/oom_kills.h"

#include <fstream>

namespace megashard {
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
