#pragma once

#include "models/kernels/gpu/row_threads.h"

/// Runs threads of row_threads.h on a GPU; on_host::run_rows of gpu_kernels.cpp is the CPU version.
namespace megashard::gpu {

/// Mask of a group's threads within a warp: other groups of the warp may have fewer rows.
template <int kGroup>
__device__ unsigned lanes_of_group() {
  if constexpr (kGroup >= kWarp) {
    return ~0U;
  } else {
    return ((1U << kGroup) - 1U) << (threadIdx.x % kWarp / kGroup * kGroup);
  }
}

__device__ inline float of_lane(float value, int distance, unsigned lanes) {
  return __shfl_xor_sync(lanes, value, distance);
}

/// combined() over kGroup threads (a warp, part of one, or a block); bit-identical in each thread.
template <int kGroup, class Value>
__device__ Value over_group(Value value) {
  const unsigned lanes = lanes_of_group<kGroup>();
  for (int distance = (kGroup < kWarp ? kGroup : kWarp) / 2; distance > 0; distance /= 2)
    value = combined(value, of_lane(value, distance, lanes));
  if constexpr (kGroup > kWarp) {
    __shared__ Value of_warps[kGroup / kWarp];
    __syncthreads();  // the previous row has been read
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = of_warps[0];
    for (int warp = 1; warp < kGroup / kWarp; ++warp) value = combined(value, of_warps[warp]);
  }
  return value;
}

template <class Threads>
constexpr int kThreadsOfBlock = Threads::kGroup > kWarp ? Threads::kGroup : kBlock;

/// Minimum number of threads for which a multiprocessor has registers. Allows 128 registers per thread unless the class
/// limits them, because most kernels would spill.
template <class Threads>
constexpr int kThreadsAtOnce = [] {
  if constexpr (requires { Threads::kThreadsAtOnce; }) return Threads::kThreadsAtOnce;
  return 512;
}();

template <class Threads>
constexpr int kBlocksAtOnce = kThreadsAtOnce<Threads> / kThreadsOfBlock<Threads>;

template <class Threads>
__global__ __launch_bounds__(kThreadsOfBlock<Threads>,
                             kBlocksAtOnce<Threads>) void rows_kernel(const typename Threads::Launch launch) {
  constexpr int kGroups = kThreadsOfBlock<Threads> / Threads::kGroup;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / Threads::kGroup;
  if (group >= Threads::groups(launch)) return;
  const int lane = static_cast<int>(threadIdx.x) % Threads::kGroup;
  typename Threads::Registers mine;
  for (int64_t row = group; row < Threads::rows(launch); row += Threads::groups(launch)) {
    Threads::before(launch, row, lane, mine);
    mine.partial = over_group<Threads::kGroup>(mine.partial);
    Threads::after(launch, row, lane, mine);
  }
  Threads::end(launch, group, lane, mine);
}

template <class Threads>
void launch_rows(const typename Threads::Launch& launch, cudaStream_t stream) {
  constexpr int64_t kGroups = kThreadsOfBlock<Threads> / Threads::kGroup;
  const int64_t blocks = (Threads::groups(launch) + kGroups - 1) / kGroups;
  if (blocks == 0) return;
  rows_kernel<Threads><<<static_cast<unsigned>(blocks), kThreadsOfBlock<Threads>, 0, stream>>>(launch);
}

}  // namespace megashard::gpu
