#include "parallel/lanes/instructions.h"

#include <cstdlib>
#include <string_view>

namespace megashard {

bool cpu_has(Instructions instructions) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  switch (instructions) {
    case Instructions::kAvx512:
      return __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512vl") != 0;
    case Instructions::kAvx2:
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
    case Instructions::kAnyCpu:
      break;
  }
  return true;
#else
  return instructions == Instructions::kAnyCpu;
#endif
}

Instructions best_instructions() {
  static const Instructions best = [] {
    const char* given = std::getenv("ATEN_CPU_CAPABILITY");
    const std::string_view most = given == nullptr ? "" : given;
    if (most == "default") return Instructions::kAnyCpu;
    if (most != "avx2" && cpu_has(Instructions::kAvx512)) return Instructions::kAvx512;
    return cpu_has(Instructions::kAvx2) ? Instructions::kAvx2 : Instructions::kAnyCpu;
  }();
  return best;
}

}  // namespace megashard
