#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace megashard {

/// Copies `count` elements between host buffers, converting between floating dtypes (round to nearest even); fp32 from
/// and to 16-bit floats in vectors. Not by ATen: for the small tensors of a unit its call costs more than the copy.
void copy_elements(void* destination, at::ScalarType destination_dtype, const void* source, at::ScalarType source_dtype,
                   int64_t count);
/// destination[i] += source[i], both of `dtype` (floating).
void add_elements(void* destination, const void* source, at::ScalarType dtype, int64_t count);

}  // namespace megashard
