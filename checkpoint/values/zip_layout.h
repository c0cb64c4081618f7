#pragma once

#include <cstdint>

namespace megashard {

// Constants of the ZIP format, shared by reader and writer.
inline constexpr int64_t kLocalHeaderBytes = 30;  // without the name
inline constexpr int64_t kMax32 = 0xffffffff;     // marks a 32-bit field whose value is in the Zip64 record

}  // namespace megashard
