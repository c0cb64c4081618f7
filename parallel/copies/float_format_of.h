#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "parallel/copies/float_formats.h"

namespace megashard {

inline FloatFormat float_format_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return FloatFormat::kFloat;
    case at::kDouble:
      return FloatFormat::kDouble;
    case at::kBFloat16:
      return FloatFormat::kBFloat16;
    case at::kHalf:
      return FloatFormat::kHalf;
    default:
      TORCH_CHECK(false, "cannot convert ", dtype, ": sharded parameters convert between floating dtypes only");
  }
}

}  // namespace megashard
