#include "models/kernels/attention_kernels.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "parallel/lanes/instructions.h"

namespace megashard::flash_attention {
namespace {

constexpr int64_t kBlock = 64;    // queries and keys per block
constexpr int64_t kPadding = 16;  // divides the width of scratch rows

int64_t blocks_of(const Shape& shape) { return (shape.length + kBlock - 1) / kBlock; }
int64_t width_of(const Shape& shape) { return (shape.head_dim + kPadding - 1) / kPadding * kPadding; }

template <class T>
T* at(const Heads<T>& x, int64_t row, int64_t time, int64_t head) {
  return x.data + row * x.stride_batch + time * x.stride_time + head * x.stride_head;
}

/// Ranges of keys that the queries of one row see.
class Sight {
 public:
  Sight(const Shape& shape, int64_t row)
      : length_(shape.length),
        window_(shape.window),
        begins_(shape.key_begins == nullptr ? nullptr : shape.key_begins + row * shape.length),
        ends_(shape.key_ends == nullptr ? nullptr : shape.key_ends + row * shape.length) {}

  int64_t begin(int64_t query) const {
    const int64_t of_document = begins_ == nullptr || query >= length_ ? 0 : begins_[query];
    return std::max(of_document, window_ == 0 ? 0 : query - window_ + 1);
  }
  int64_t end(int64_t query) const {
    if (query >= length_) return 0;
    return ends_ == nullptr ? query + 1 : ends_[query];
  }
  /// The block with the last key that a block's queries see.
  int64_t last_key_block(int64_t block) const {
    return (end(std::min(length_, (block + 1) * kBlock) - 1) - 1) / kBlock;
  }
  /// The first block with a query that sees keys of a block.
  int64_t first_block(int64_t key_block) const {
    int64_t block = key_block;
    while (block > 0 && last_key_block(block - 1) >= key_block) --block;
    return block;
  }
  /// True if all queries of a block see all keys of another.
  bool sees_all(int64_t first_query, int64_t first_key) const {
    const int64_t last = first_query + kBlock - 1;
    return first_key + kBlock <= end(first_query) && last < length_ && begin(last) <= first_key;
  }

 private:
  int64_t length_;
  int64_t window_;
  const int64_t *begins_, *ends_;
};

#define MEGASHARD_WITH_LANES "models/kernels/attention_blocks.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

/// Calls body(row, head, scratch) for every head of every row.
template <class Body>
void for_heads(int64_t rows, int64_t heads, float* scratch, int64_t scratch_floats, const Body& body) {
  at::parallel_for(0, rows * heads, 1, [&](int64_t begin, int64_t end) {
    float* own = scratch + at::get_thread_num() * scratch_floats;
    for (int64_t each = begin; each < end; ++each) body(each / heads, each % heads, own);
  });
}

}  // namespace

int64_t forward_scratch(const Shape& shape) {
  return (2 * blocks_of(shape) + 2) * kBlock * width_of(shape) + kBlock * kBlock + 2 * kBlock;
}

int64_t backward_scratch(const Shape& shape) {
  const int64_t rows = blocks_of(shape) * kBlock;
  return 5 * rows * width_of(shape) + rows + 3 * kBlock * width_of(shape) + 2 * kBlock * kBlock;
}

template <class T>
void forward(Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> out, float* lse, const Shape& shape, float* scratch) {
  for_heads(shape.batch, shape.heads, scratch, forward_scratch(shape), [&](int64_t row, int64_t head, float* own) {
    MEGASHARD_RUN(Forward, q, k, v, out, lse, shape, row, head, own);
  });
}

template <class T>
void backward(Heads<T> grad_out, Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> out, const float* lse,
              const Gradients<T>& grads, const Shape& shape, float* scratch) {
  for_heads(shape.batch, shape.key_heads, scratch, backward_scratch(shape), [&](int64_t row, int64_t head, float* own) {
    MEGASHARD_RUN(Backward, grad_out, q, k, v, out, lse, grads, shape, row, head, own);
  });
}

#define MEGASHARD_INSTANTIATE(T)                                                                              \
  template void forward(Heads<T>, Heads<T>, Heads<T>, Heads<T>, float*, const Shape&, float*);                \
  template void backward(Heads<T>, Heads<T>, Heads<T>, Heads<T>, Heads<T>, const float*, const Gradients<T>&, \
                         const Shape&, float*)
MEGASHARD_INSTANTIATE(float);
MEGASHARD_INSTANTIATE(c10::BFloat16);
MEGASHARD_INSTANTIATE(c10::Half);
#undef MEGASHARD_INSTANTIATE
#undef MEGASHARD_RUN

}  // namespace megashard::flash_attention
