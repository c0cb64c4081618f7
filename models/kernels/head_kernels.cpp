#include "models/kernels/head_kernels.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "parallel/lanes/instructions.h"

namespace megashard::kernels {
namespace of_heads {
namespace {

#define MEGASHARD_WITH_LANES "models/kernels/head_kernels.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

template <class Body>
void for_tokens(const RotaryShape& shape, const Body& body) {
  constexpr int64_t kElementsOfAThread = 1 << 15;
  const int64_t of_token = std::max<int64_t>(1, shape.heads * shape.head_dim);
  at::parallel_for(0, shape.batch * shape.length, std::max<int64_t>(1, kElementsOfAThread / of_token), body);
}

template <class T>
void forward(const HeadArrays<T>* of, T* y, float* inverse_rms, const RotaryShape* shape, float eps, int64_t begin,
             int64_t end) {
  MEGASHARD_RUN(NormAndRotate, of, y, inverse_rms, shape, eps, begin, end)
}
template <class T>
void backward(const T* grad_y, const HeadArrays<T>* of, const float* inverse_rms, T* grad_x, float* grad_weight,
              const RotaryShape* shape, int64_t begin, int64_t end) {
  MEGASHARD_RUN(NormAndRotateBackward, grad_y, of, inverse_rms, grad_x, grad_weight, shape, begin, end)
}
#undef MEGASHARD_RUN

}  // namespace
}  // namespace of_heads

template <class T>
void norm_and_rotate(const HeadArrays<T>& of, T* y, float* inverse_rms, const RotaryShape& shape, float eps) {
  of_heads::for_tokens(shape, [&](int64_t begin, int64_t end) {
    of_heads::forward(&of, y, inverse_rms, &shape, eps, begin, end);
  });
}

template <class T>
void norm_and_rotate_backward(const T* grad_y, const HeadArrays<T>& of, const float* inverse_rms, T* grad_x,
                              float* grad_weight, const RotaryShape& shape) {
  const int64_t width = shape.head_dim, threads = at::get_num_threads();
  // [threads, width], added in thread order: an equal number of threads gives equal bits
  std::vector<float> partial(grad_weight == nullptr ? 0 : static_cast<size_t>(threads * width));
  of_heads::for_tokens(shape, [&](int64_t begin, int64_t end) {
    float* const own = grad_weight == nullptr ? nullptr : partial.data() + at::get_thread_num() * width;
    of_heads::backward(grad_y, &of, inverse_rms, grad_x, own, &shape, begin, end);
  });
  if (grad_weight == nullptr) return;
  std::copy_n(partial.data(), width, grad_weight);
  for (int64_t thread = 1; thread < threads; ++thread) {
    for (int64_t j = 0; j < width; ++j) grad_weight[j] += partial[static_cast<size_t>(thread * width + j)];
  }
}

#define MEGASHARD_INSTANTIATE(T)                                                                    \
  template void norm_and_rotate(const HeadArrays<T>&, T*, float*, const RotaryShape&, float);      \
  template void norm_and_rotate_backward(const T*, const HeadArrays<T>&, const float*, T*, float*, \
                                         const RotaryShape&)
MEGASHARD_INSTANTIATE(float);
MEGASHARD_INSTANTIATE(c10::BFloat16);
MEGASHARD_INSTANTIATE(c10::Half);
#undef MEGASHARD_INSTANTIATE

}  // namespace megashard::kernels
