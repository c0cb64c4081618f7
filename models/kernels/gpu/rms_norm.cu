#include "models/kernels/gpu/head_norm_grad_rows.h"
#include "models/kernels/gpu/head_norm_rows.h"
#include "models/kernels/gpu/launches.h"
#include "models/kernels/gpu/rms_norm_grad_rows.h"
#include "models/kernels/gpu/row_kernels.cuh"

namespace megashard::gpu {
namespace {

__global__ __launch_bounds__(ColumnSums::kThreads) void column_sums_kernel(const RmsNormGradRows launch) {
  __shared__ float parts[ColumnSums::kThreads];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * ColumnSums::kColumns;
  ColumnSums::part(launch, first, static_cast<int>(threadIdx.x), parts);
  __syncthreads();
  ColumnSums::whole(launch, first, static_cast<int>(threadIdx.x), parts);
}

void launch_column_sums(const RmsNormGradRows& launch, cudaStream_t stream) {
  const int64_t blocks = (launch.width + ColumnSums::kColumns - 1) / ColumnSums::kColumns;
  if (launch.grad_weight == nullptr || blocks == 0) return;
  column_sums_kernel<<<static_cast<unsigned>(blocks), ColumnSums::kThreads, 0, stream>>>(launch);
}

}  // namespace

void launch_rms_norm(const RmsNormRows& launch, cudaStream_t stream) {
  with_norm_threads<RmsNormThreads>(
      launch, [&](auto threads) { launch_rows<typename decltype(threads)::Type>(launch, stream); });
}

void launch_rms_norm_grad(const RmsNormGradRows& launch, cudaStream_t stream) {
  with_norm_threads<RmsNormGradThreads>(
      launch, [&](auto threads) { launch_rows<typename decltype(threads)::Type>(launch, stream); });
  launch_column_sums(launch, stream);
}

void launch_head_norm(const HeadNormRows& launch, cudaStream_t stream) {
  with_head_threads<HeadNormThreads>(
      launch, [&](auto threads) { launch_rows<typename decltype(threads)::Type>(launch, stream); });
}

void launch_head_norm_grad(const HeadNormGradRows& launch, cudaStream_t stream) {
  with_head_threads<HeadNormGradThreads>(
      launch, [&](auto threads) { launch_rows<typename decltype(threads)::Type>(launch, stream); });
  launch_column_sums(column_sums_of(launch), stream);
}

}  // namespace megashard::gpu
