#pragma once

#include <cstdint>

namespace megashard {

// Numbers of the ZIP format that reader and writer share.
inline constexpr int64_t kLocalHeaderBytes = 30;  // before the name
inline constexpr int64_t kMax32 = 0xffffffff;     // in a 32-bit field: the value stands in the Zip64 record

}  // namespace megashard
