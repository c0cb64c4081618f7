#include "models/kernels/gpu/launches.h"
#include "models/kernels/gpu/rotary_threads.h"
#include "models/kernels/gpu/swiglu_threads.h"

namespace megashard::gpu {
namespace {

template <class T, class Launch>
__global__ __launch_bounds__(kBlock, 4) void swiglu_kernel(const Launch launch) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  swiglu_in_thread<T>(launch, thread, static_cast<int64_t>(gridDim.x) * kBlock);
}

/// Launches a thread per two vectors.
template <class Launch>
void launch_elements(const Launch& launch, cudaStream_t stream) {
  with_row_format(launch.format, [&](auto zero) {
    using T = decltype(zero);
    const int64_t of_block = 2 * int64_t{kBlock} * (launch.vectors ? kVectorOf<T> : 1);
    const int64_t blocks = (launch.shape.numel() + of_block - 1) / of_block;
    if (blocks > 0) swiglu_kernel<T><<<static_cast<unsigned>(blocks), kBlock, 0, stream>>>(launch);
  });
}

template <class T, int kVector>
__global__ __launch_bounds__(kBlock) void rotate_kernel(const RotaryTokens launch) {
  rotate_token<T, kVector>(launch, blockIdx.x, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
}

}  // namespace

void launch_swiglu(const SwigluElements& launch, cudaStream_t stream) { launch_elements(launch, stream); }
void launch_swiglu_grad(const SwigluGradElements& launch, cudaStream_t stream) { launch_elements(launch, stream); }

void launch_rotate(const RotaryTokens& launch, cudaStream_t stream) {
  const auto tokens = static_cast<unsigned>(launch.batch * launch.length);
  const auto threads = static_cast<unsigned>(rotary_threads(launch));
  if (tokens == 0 || threads == 0) return;
  with_row_format(launch.format, [&](auto zero) {
    using T = decltype(zero);
    if (launch.vectors) {
      rotate_kernel<T, kVectorOf<T>><<<tokens, threads, 0, stream>>>(launch);
    } else {
      rotate_kernel<T, 1><<<tokens, threads, 0, stream>>>(launch);
    }
  });
}

}  // namespace megashard::gpu
