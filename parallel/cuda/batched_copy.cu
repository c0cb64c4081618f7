#include "parallel/copies/copy_table.h"
#include "parallel/cuda/launches.h"

namespace megashard {
namespace {

/// The table goes through the constant cache: all threads of a block read the same piece.
__global__ __launch_bounds__(CopyTable::kThreads) void copy_kernel(const __grid_constant__ CopyTable table) {
  copy_tile(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

}  // namespace

void launch_copy(const CopyTable& table, cudaStream_t stream) {
  copy_kernel<<<static_cast<unsigned>(table.tiles), CopyTable::kThreads, 0, stream>>>(table);
}

}  // namespace megashard
