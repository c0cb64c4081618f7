#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace megashard {

/// Copies `count` elements between host buffers and converts floating dtypes (round to nearest even); fp32 from and to
/// 16-bit floats is vectorised. Avoids ATen, whose call overhead exceeds the copy of a unit's small tensors.
void copy_elements(void* destination, at::ScalarType destination_dtype, const void* source, at::ScalarType source_dtype,
                   int64_t count);
/// destination[i] += source[i], both of `dtype` (floating).
void add_elements(void* destination, const void* source, at::ScalarType dtype, int64_t count);

}  // namespace megashard
