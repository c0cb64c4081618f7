#include "models/kernels/delta_kernels.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "models/kernels/chunks.h"
#include "parallel/lanes/instructions.h"

namespace megashard::delta_kernels {
namespace {

constexpr int64_t kStrip = 16;  // rows of a triangular matrix that are multiplied at once; divides the width of rows

int64_t padded(int64_t count) { return (count + kStrip - 1) / kStrip * kStrip; }
int64_t chunks_of(const Shape& shape) { return (shape.length + kChunk - 1) / kChunk; }

/// The state of a head before a chunk, [padded key_dim, padded value_dim].
template <class T>
T* state_before(T* states, const Shape& shape, int64_t row, int64_t head, int64_t chunk) {
  const int64_t place = (row * shape.value_heads + head) * chunks_of(shape) + chunk;
  return states + place * padded(shape.key_dim) * padded(shape.value_dim);
}

/// Hands out parts of a thread's scratch memory.
class Scratch {
 public:
  explicit Scratch(float* begin) : next_(begin) {}
  float* take(int64_t floats) {
    next_ += floats;
    return next_ - floats;
  }

 private:
  float* next_;
};

#define MEGASHARD_WITH_LANES "models/kernels/delta_kernels.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

/// Calls body(row, key head, scratch) for every key head of every row.
template <class Body>
void for_key_heads(const Shape& shape, float* scratch, const Body& body) {
  at::parallel_for(0, shape.batch * shape.key_heads, 1, [&](int64_t begin, int64_t end) {
    float* own = scratch + at::get_thread_num() * scratch_floats(shape);
    for (int64_t each = begin; each < end; ++each) body(each / shape.key_heads, each % shape.key_heads, own);
  });
}

}  // namespace

int64_t state_floats(const Shape& shape) {
  return shape.batch * shape.value_heads * chunks_of(shape) * padded(shape.key_dim) * padded(shape.value_dim);
}

int64_t scratch_floats(const Shape& shape) {
  const int64_t keys = padded(shape.key_dim), values = padded(shape.value_dim);
  const int64_t of_chunk = kChunk * (6 * keys + 8 * values + 9 * kChunk);
  return of_chunk + (shape.value_heads / shape.key_heads + 1) * keys * values;
}

void forward(const Arrays<const float>& of, float* out, float* states, const Shape& shape, float* scratch) {
  using T = float;
  for_key_heads(shape, scratch, [&](int64_t row, int64_t key_head, float* own) {
    MEGASHARD_RUN(Forward, of, out, states, shape, row, key_head, own);
  });
}

void backward(const Arrays<const float>& of, const float* grad_out, const float* states, const Arrays<float>& grads,
              const Shape& shape, float* scratch) {
  using T = float;
  for_key_heads(shape, scratch, [&](int64_t row, int64_t key_head, float* own) {
    MEGASHARD_RUN(Backward, of, grad_out, states, grads, shape, row, key_head, own);
  });
}
#undef MEGASHARD_RUN

}  // namespace megashard::delta_kernels
