#include "parallel/cuda/launches.h"
#include "parallel/updates/adamw_table.h"
#include "parallel/updates/squares_table.h"

namespace megashard {
namespace {

// Tables go through the constant cache: all threads of a block read the same piece.

__global__ __launch_bounds__(AdamWTable::kThreads, 4) void adamw_kernel(const __grid_constant__ AdamWTable table) {
  adamw_tile(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

/// Sum over the threads of a block, valid in thread 0.
__device__ double sum_of_block(double mine) {
  __shared__ double sums[SquaresTable::kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = mine;
  for (int distance = SquaresTable::kThreads / 2; distance > 0; distance /= 2) {
    __syncthreads();
    add_partner(sums, distance, thread);
  }
  return sums[thread];
}

__global__ __launch_bounds__(SquaresTable::kThreads) void squares_kernel(const __grid_constant__ SquaresTable table) {
  const double sum = sum_of_block(squares_of_thread(table, blockIdx.x, static_cast<int>(threadIdx.x)));
  if (threadIdx.x == 0) table.sums[blockIdx.x] = sum;
}

__global__ __launch_bounds__(SquaresTable::kThreads) void squares_total_kernel(const SquaresTotal of) {
  const double sum = sum_of_block(total_of_thread(of, static_cast<int>(threadIdx.x)));
  if (threadIdx.x == 0) *of.total = sum;
}

}  // namespace

void launch_adamw(const AdamWTable& table, cudaStream_t stream) {
  adamw_kernel<<<static_cast<unsigned>(table.tiles), AdamWTable::kThreads, 0, stream>>>(table);
}

void launch_squares(const SquaresTable& table, cudaStream_t stream) {
  squares_kernel<<<static_cast<unsigned>(table.tiles), SquaresTable::kThreads, 0, stream>>>(table);
}

void launch_squares_total(const SquaresTotal& of, cudaStream_t stream) {
  squares_total_kernel<<<1, SquaresTable::kThreads, 0, stream>>>(of);
}

}  // namespace megashard
