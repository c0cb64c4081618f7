#include "launch/plan/plan_flags.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "framework/arguments/argument_value.h"
#include "launch/plan/device_file.h"

namespace megashard {

std::string default_device_line(const std::string& flag) {
  return "without " + flag + " the plan is of " + kDefaultDevice + "; there are " + c10::Join(", ", device_names()) +
         ", and `megashard plan --measure FILE` measures this machine for " + flag + " FILE";
}

int read_world_size(CommandLine& line) {
  const std::string text = line.own_value(kWorldSize, "1");
  const int64_t ranks = parse_integer(text).value_or(0);
  line.mistakes.require(0 < ranks && ranks <= (1 << 24), "--world-size takes a number of ranks, got \"" + text + "\".");
  return static_cast<int>(std::max<int64_t>(ranks, 1));
}

}  // namespace megashard
