#pragma once

#include <cmath>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>  // of lanes.inc
#endif

namespace megashard {

/// The instruction sets that each_instruction_set.inc compiles for.
enum class Instructions { kAnyCpu, kAvx2, kAvx512 };

/// Whether this CPU, and the compiler of this library, has them.
bool cpu_has(Instructions instructions);

/// Of this CPU; ATEN_CPU_CAPABILITY (avx2, default), which LibTorch reads for its own kernels, may ask for fewer.
Instructions best_instructions();

}  // namespace megashard
