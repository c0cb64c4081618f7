#include "launch/plan/plan_flags.h"

#include <algorithm>

#include "framework/arguments/typed_text.h"

namespace megashard {

int read_world_size(CommandLine& line) {
  const std::string text = line.own_value(kWorldSize, "1");
  const int64_t ranks = parse_integer(text).value_or(0);
  line.mistakes.require(0 < ranks && ranks <= (1 << 24), "--world-size takes a number of ranks, got \"" + text + "\".");
  return static_cast<int>(std::max<int64_t>(ranks, 1));
}

}  // namespace megashard
