#include "parallel/copies/element_copy.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cstring>
#include <type_traits>

#include "parallel/lanes/instructions.h"

namespace megashard {

namespace element_copy {
namespace {

#define MEGASHARD_WITH_LANES "parallel/copies/element_copy_loops.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

template <class From, class To>
void convert(const From* from, To* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
}
template <class T>
  requires(sizeof(T) == 2)
void convert(const float* from, T* to, int64_t count) {
  MEGASHARD_RUN(FromFloats, from, to, count)
}
template <class T>
  requires(sizeof(T) == 2)
void convert(const T* from, float* to, int64_t count) {
  MEGASHARD_RUN(ToFloats, from, to, count)
}
#undef MEGASHARD_RUN

}  // namespace
}  // namespace element_copy

namespace {

template <class Function>
void with_floating_type(at::ScalarType dtype, Function function) {
  switch (dtype) {
    case at::kFloat:
      return function(float{});
    case at::kDouble:
      return function(double{});
    case at::kBFloat16:
      return function(c10::BFloat16{});
    case at::kHalf:
      return function(c10::Half{});
    default:
      TORCH_CHECK(false, "cannot convert ", dtype, ": sharded parameters convert between floating dtypes only");
  }
}

}  // namespace

void copy_elements(void* destination, at::ScalarType destination_dtype, const void* source, at::ScalarType source_dtype,
                   int64_t count) {
  if (count == 0) return;
  if (destination_dtype == source_dtype) {
    if (destination != source) std::memcpy(destination, source, count * c10::elementSize(source_dtype));
    return;
  }
  with_floating_type(destination_dtype, [&]<class To>(To) {
    with_floating_type(source_dtype, [&]<class From>(From) {
      element_copy::convert(static_cast<const From*>(source), static_cast<To*>(destination), count);
    });
  });
}

void add_elements(void* destination, const void* source, at::ScalarType dtype, int64_t count) {
  with_floating_type(dtype, [&]<class T>(T) {
    auto* to = static_cast<T*>(destination);
    const auto* from = static_cast<const T*>(source);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(to[i] + from[i]);
  });
}

}  // namespace megashard
