#include "models/kernels/gpu/cross_entropy_grad_rows.h"
#include "models/kernels/gpu/launches.h"
#include "models/kernels/gpu/row_kernels.cuh"

namespace megashard::gpu {

__device__ inline MaxSum of_lane(const MaxSum& value, int distance, unsigned lanes) {
  return {of_lane(value.largest, distance, lanes), of_lane(value.sum, distance, lanes)};
}

namespace {

template <class T>
__global__ __launch_bounds__(CrossEntropyGradThreads<T>::kThreads) void cross_entropy_grad_kernel(
    const CrossEntropyGradRows launch) {
  CrossEntropyGradThreads<T>::run(launch, blockIdx.x, static_cast<int>(threadIdx.x));
}

}  // namespace

void launch_cross_entropy(const CrossEntropyRows& launch, cudaStream_t stream) {
  with_row_format(launch.format, [&](auto zero) { launch_rows<CrossEntropyThreads<decltype(zero)>>(launch, stream); });
}

void launch_cross_entropy_grad(const CrossEntropyGradRows& launch, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(launch.rows * launch.tiles_per_row());
  if (blocks == 0) return;
  with_row_format(launch.format, [&](auto zero) {
    using Threads = CrossEntropyGradThreads<decltype(zero)>;
    cross_entropy_grad_kernel<decltype(zero)><<<blocks, Threads::kThreads, 0, stream>>>(launch);
  });
}

}  // namespace megashard::gpu
