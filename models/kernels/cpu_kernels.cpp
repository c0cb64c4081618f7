#include "models/kernels/cpu_kernels.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "parallel/lanes/instructions.h"

namespace megashard::kernels {
namespace {

#define MEGASHARD_WITH_LANES "models/kernels/row_kernels.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

constexpr int64_t kGrain = 1 << 15;  // minimum number of elements per thread

template <class Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), body);
}

/// for_rows with body(begin, end, sums), whose sums [count] are added in thread order: an equal number of threads gives
/// equal bits. Overwrites sums; null: the body's are, too.
template <class Body>
void for_rows_with_sums(int64_t rows, int64_t width, float* sums, int64_t count, const Body& body) {
  const int64_t threads = at::get_num_threads();
  std::vector<float> partial(sums == nullptr ? 0 : static_cast<size_t>(threads * count));
  for_rows(rows, width, [&](int64_t begin, int64_t end) {
    body(begin, end, sums == nullptr ? nullptr : partial.data() + at::get_thread_num() * count);
  });
  if (sums == nullptr) return;
  std::copy_n(partial.data(), count, sums);
  for (int64_t thread = 1; thread < threads; ++thread) {
    for (int64_t j = 0; j < count; ++j) sums[j] += partial[static_cast<size_t>(thread * count + j)];
  }
}

/// Calls body(offset in contiguous rows, offset in rows `stride` apart, length) for runs that are contiguous in both.
template <class Body>
void for_parts(int64_t rows, int64_t width, int64_t stride, const Body& body) {
  if (stride == width) {
    return for_rows(rows * width, 1, [&](int64_t begin, int64_t end) { body(begin, begin, end - begin); });
  }
  for_rows(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row * width, row * stride, width);
  });
}

}  // namespace

template <class T>
void rms_norm(const T* x, const T* branch, T* sum, const T* weight, T* y, float* inverse_rms, int64_t rows,
              int64_t width, float eps) {
  for_rows(rows, width, [=](int64_t begin, int64_t end) {
    MEGASHARD_RUN(RmsNorm, x + begin * width, branch == nullptr ? nullptr : branch + begin * width,
                  sum == nullptr ? nullptr : sum + begin * width, weight, y + begin * width, inverse_rms + begin,
                  end - begin, width, eps);
  });
}

template <class T>
void rms_norm_backward(const T* grad_y, const T* x, const T* weight, const float* inverse_rms, const T* grad_sum,
                       T* grad_x, float* grad_weight, int64_t rows, int64_t width) {
  for_rows_with_sums(rows, width, grad_weight, width, [=](int64_t begin, int64_t end, float* sums) {
    MEGASHARD_RUN(RmsNormBackward, grad_y + begin * width, x + begin * width, weight, inverse_rms + begin,
                  grad_sum == nullptr ? nullptr : grad_sum + begin * width, grad_x + begin * width, sums, end - begin,
                  width);
  });
}

template <class T>
void rotate(const T* x, const T* cos, const T* sin, T* y, const RotaryShape& shape, const HeadStrides& of_y,
            bool back) {
  for_rows(shape.batch * shape.length, shape.heads * shape.head_dim, [&](int64_t begin, int64_t end) {
    MEGASHARD_RUN(Rotate, x, cos, sin, y, &shape, &of_y, back ? -1.0F : 1.0F, begin, end);
  });
}

template <class T>
void swiglu(const T* gate, const T* up, T* y, int64_t rows, int64_t width, int64_t stride) {
  for_parts(rows, width, stride, [=](int64_t dense, int64_t at, int64_t count) {
    MEGASHARD_RUN(Swiglu, gate + at, up + at, y + dense, count);
  });
}

template <class T>
void swiglu_backward(const T* grad_y, const T* gate, const T* up, T* grad_gate, T* grad_up, T* y, int64_t rows,
                     int64_t width, int64_t stride) {
  for_parts(rows, width, stride, [=](int64_t dense, int64_t at, int64_t count) {
    MEGASHARD_RUN(SwigluBackward, grad_y + dense, gate + at, up + at, grad_gate + at, grad_up + at,
                  y == nullptr ? nullptr : y + dense, count);
  });
}

template <class T>
void cross_entropy(const T* logits, const int64_t* labels, float* loss, float* stats, int64_t rows, int64_t width) {
  for_rows(rows, width, [=](int64_t begin, int64_t end) {
    MEGASHARD_RUN(CrossEntropy, logits + begin * width, labels + begin, loss + begin, stats + 2 * begin, end - begin,
                  width);
  });
}

template <class T>
void cross_entropy_backward_(T* logits, const int64_t* labels, const float* stats, const float* grad_loss, int64_t rows,
                             int64_t width, int64_t ignore_index) {
  for_rows(rows, width, [=](int64_t begin, int64_t end) {
    MEGASHARD_RUN(CrossEntropyBackward, logits + begin * width, labels + begin, stats + 2 * begin, grad_loss + begin,
                  end - begin, width, ignore_index);
  });
}

void causal_conv(const float* x, const float* taps, float* y, const ConvShape& shape) {
  using T = float;
  for_rows(shape.batch * shape.length, shape.channels * shape.taps,
           [&](int64_t begin, int64_t end) { MEGASHARD_RUN(CausalConv, x, taps, y, &shape, begin, end); });
}

void causal_conv_backward(const float* grad_y, const float* x, const float* taps, float* grad_x, float* grad_taps,
                          const ConvShape& shape) {
  using T = float;
  const int64_t width = shape.taps * shape.channels;
  for_rows_with_sums(shape.batch * shape.length, width, grad_taps, width, [&](int64_t begin, int64_t end, float* sums) {
    MEGASHARD_RUN(CausalConvBackward, grad_y, x, taps, grad_x, sums, &shape, begin, end);
  });
}

#define MEGASHARD_INSTANTIATE(T)                                                                                       \
  template void rms_norm(const T*, const T*, T*, const T*, T*, float*, int64_t, int64_t, float);                       \
  template void rms_norm_backward(const T*, const T*, const T*, const float*, const T*, T*, float*, int64_t, int64_t); \
  template void rotate(const T*, const T*, const T*, T*, const RotaryShape&, const HeadStrides&, bool);                \
  template void swiglu(const T*, const T*, T*, int64_t, int64_t, int64_t);                                             \
  template void swiglu_backward(const T*, const T*, const T*, T*, T*, T*, int64_t, int64_t, int64_t);                  \
  template void cross_entropy(const T*, const int64_t*, float*, float*, int64_t, int64_t);                             \
  template void cross_entropy_backward_(T*, const int64_t*, const float*, const float*, int64_t, int64_t, int64_t)
MEGASHARD_INSTANTIATE(float);
MEGASHARD_INSTANTIATE(c10::BFloat16);
MEGASHARD_INSTANTIATE(c10::Half);
#undef MEGASHARD_INSTANTIATE
#undef MEGASHARD_RUN

}  // namespace megashard::kernels
