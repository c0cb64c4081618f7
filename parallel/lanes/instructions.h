#pragma once

#include <cmath>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>  // for lanes.inc
#endif

namespace megashard {

/// Instruction sets that each_instruction_set.inc compiles for.
enum class Instructions { kAnyCpu, kAvx2, kAvx512 };

/// True if both this CPU and this library's compiler have them.
bool cpu_has(Instructions instructions);

/// Best set of this CPU; ATEN_CPU_CAPABILITY (avx2, default), which LibTorch reads for its own kernels, may lower it.
Instructions best_instructions();

}  // namespace megashard
