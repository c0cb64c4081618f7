#include "parallel/sim/settings.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <sstream>
#include <string>

namespace megashard::sim {
namespace {

Settings from_environment() {
  Settings result;
  const char* text = std::getenv("MEGASHARD_SIM");
  std::istringstream words(text == nullptr ? "" : text);
  for (std::string word; std::getline(words, word, ',');) {
    const auto sign = word.find('=');
    const std::string key = word.substr(0, sign);
    const auto number = [&] {
      const char* digits = word.c_str() + sign + 1;
      char* end = nullptr;
      const auto value = std::strtoull(digits, &end, 10);
      TORCH_CHECK(sign != word.npos && end != digits && *end == '\0', "MEGASHARD_SIM: '", word,
                  "' needs a number, as in ", key, "=512");
      return value;
    };
    if (key == "capacity_mib") {
      result.capacity = static_cast<size_t>(number()) << 20;
    } else if (key == "shuffle") {
      result.shuffle_seed = number();
    } else if (word == "stacks") {
      result.stacks = true;
    } else if (word == "expandable_segments") {
      result.expandable_segments = true;
    } else {
      TORCH_CHECK(false, "MEGASHARD_SIM: '", word,
                  "' is unknown; there are capacity_mib=N, shuffle=SEED, stacks and expandable_segments");
    }
  }
  return result;
}

}  // namespace

Settings& settings() {
  static Settings current = from_environment();
  return current;
}

}  // namespace megashard::sim
