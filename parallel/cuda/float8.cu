#include <algorithm>
#include <type_traits>

#include "parallel/copies/float8_rows.h"
#include "parallel/cuda/launches.h"

namespace megashard {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 2048;

__device__ int64_t thread_of_grid() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ int64_t threads_of_grid() { return static_cast<int64_t>(gridDim.x) * kThreads; }

/// The maximum of bits is independent of the order of blocks.
template <class From>
__global__ __launch_bounds__(kThreads) void amax_kernel(const Float8Quantise quantise) {
  const uint32_t mine = amax_of_thread<From>(quantise, 0, thread_of_grid(), threads_of_grid());
  const uint32_t of_warp = __reduce_max_sync(~0U, mine);
  __shared__ uint32_t of_warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t of_block = 0;
  for (const uint32_t each : of_warps) of_block = each > of_block ? each : of_block;
  atomicMax(quantise.amax, of_block);
}

template <class From>
__global__ __launch_bounds__(kThreads) void quantise_kernel(const Float8Quantise quantise) {
  quantise_in_thread<From>(quantise, 0, *quantise.amax, thread_of_grid(), threads_of_grid());
}

/// One warp per row. Two blocks per multiprocessor (four below) leave enough registers for fp64 without spills.
template <class From>
__global__ __launch_bounds__(kThreads, 2) void quantise_rows_kernel(const Float8Quantise quantise) {
  const int64_t warps = threads_of_grid() / 32, lane = threadIdx.x % 32;
  for (int64_t row = thread_of_grid() / 32; row < quantise.scale_count; row += warps) {
    const uint32_t amax = __reduce_max_sync(~0U, amax_of_thread<From>(quantise, row, lane, 32));
    quantise_in_thread<From>(quantise, row, amax, lane, 32);
  }
}

template <class To, bool kHasRows>
__global__ __launch_bounds__(kThreads, 4) void dequantise_kernel(const Float8Dequantise dequantise) {
  dequantise_payload<To, kHasRows>(dequantise, static_cast<int>(blockIdx.y), thread_of_grid(), threads_of_grid());
}

/// Four vectors of eight per thread while the grid limit allows.
unsigned blocks_for(int64_t numel) {
  const int64_t blocks = (numel + 32 * kThreads - 1) / (32 * kThreads);
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

}  // namespace

void launch_quantise(const Float8Quantise& quantise, cudaStream_t stream) {
  with_format(quantise.format, [&](auto zero) {
    using From = decltype(zero);
    if (quantise.amax == nullptr) {
      constexpr int64_t kRows = kThreads / 32;
      const auto blocks = std::min<int64_t>((quantise.scale_count + kRows - 1) / kRows, kMaxBlocks);
      quantise_rows_kernel<From><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(quantise);
      return;
    }
    const unsigned blocks = blocks_for(quantise.row_numel);
    if (quantise.numel > 0) amax_kernel<From><<<blocks, kThreads, 0, stream>>>(quantise);
    quantise_kernel<From><<<blocks, kThreads, 0, stream>>>(quantise);
  });
}

void launch_dequantise(const Float8Dequantise& dequantise, cudaStream_t stream) {
  const dim3 grid(blocks_for(dequantise.runs * dequantise.chunk_run), static_cast<unsigned>(dequantise.ranks));
  with_format(dequantise.format, [&](auto zero) {
    using To = decltype(zero);
    if (has_rows(dequantise)) {
      dequantise_kernel<To, true><<<grid, kThreads, 0, stream>>>(dequantise);
    } else {
      dequantise_kernel<To, false><<<grid, kThreads, 0, stream>>>(dequantise);
    }
  });
}

}  // namespace megashard
