#include "models/kernels/gpu/gpu_kernels.h"

#include <c10/util/Exception.h>

#include <array>

#include "models/kernels/gpu/cross_entropy_grad_rows.h"
#include "models/kernels/gpu/head_norm_grad_rows.h"
#include "models/kernels/gpu/head_norm_rows.h"
#include "models/kernels/gpu/rms_norm_grad_rows.h"
#include "models/kernels/gpu/rotary_threads.h"
#include "models/kernels/gpu/swiglu_threads.h"
#include "parallel/device/cuda_module.h"

namespace megashard::gpu {
namespace on_host {

/// Reduces `partial` as __shfl_xor_sync and shared memory do (row_kernels.cuh): halves within each warp, then warps in
/// order.
template <class Registers, size_t kGroup>
void reduce(std::array<Registers, kGroup>& threads) {
  using Value = decltype(Registers::partial);
  std::array<Value, kGroup> values;
  for (size_t lane = 0; lane < kGroup; ++lane) values[lane] = threads[lane].partial;
  for (size_t distance = (kGroup < kWarp ? kGroup : kWarp) / 2; distance > 0; distance /= 2) {
    const auto before = values;
    for (size_t lane = 0; lane < kGroup; ++lane) values[lane] = combined(before[lane], before[lane ^ distance]);
  }
  Value all = values[0];
  for (size_t warp = kWarp; warp < kGroup; warp += kWarp) all = combined(all, values[warp]);
  for (Registers& thread : threads) thread.partial = all;
}

template <class Threads>
void run_rows(const typename Threads::Launch& launch) {
  for (int64_t group = 0; group < Threads::groups(launch); ++group) {
    std::array<typename Threads::Registers, Threads::kGroup> threads{};
    const auto each = [&](const auto& phase) {
      for (int lane = 0; lane < Threads::kGroup; ++lane) phase(lane, threads[static_cast<size_t>(lane)]);
    };
    for (int64_t row = group; row < Threads::rows(launch); row += Threads::groups(launch)) {
      each([&](int lane, auto& mine) { Threads::before(launch, row, lane, mine); });
      reduce(threads);
      each([&](int lane, auto& mine) { Threads::after(launch, row, lane, mine); });
    }
    each([&](int lane, auto& mine) { Threads::end(launch, group, lane, mine); });
  }
}

void rms_norm(const RmsNormRows& launch) {
  with_norm_threads<RmsNormThreads>(launch, [&](auto threads) { run_rows<typename decltype(threads)::Type>(launch); });
}

void column_sums(const RmsNormGradRows& launch) {
  if (launch.grad_weight == nullptr) return;
  std::array<float, ColumnSums::kParts * ColumnSums::kColumns> parts;
  for (int64_t first = 0; first < launch.width; first += ColumnSums::kColumns) {
    for (int thread = 0; thread < ColumnSums::kThreads; ++thread) ColumnSums::part(launch, first, thread, parts.data());
    for (int thread = 0; thread < ColumnSums::kThreads; ++thread)
      ColumnSums::whole(launch, first, thread, parts.data());
  }
}

void rms_norm_grad(const RmsNormGradRows& launch) {
  with_norm_threads<RmsNormGradThreads>(launch,
                                        [&](auto threads) { run_rows<typename decltype(threads)::Type>(launch); });
  column_sums(launch);
}

void head_norm(const HeadNormRows& launch) {
  with_head_threads<HeadNormThreads>(launch, [&](auto threads) { run_rows<typename decltype(threads)::Type>(launch); });
}

void head_norm_grad(const HeadNormGradRows& launch) {
  with_head_threads<HeadNormGradThreads>(launch,
                                         [&](auto threads) { run_rows<typename decltype(threads)::Type>(launch); });
  column_sums(column_sums_of(launch));
}

template <class Launch>
void swiglu(const Launch& launch) {
  constexpr int64_t kThreads = 64;  // any number works
  with_row_format(launch.format, [&](auto zero) {
    for (int64_t thread = 0; thread < kThreads; ++thread) swiglu_in_thread<decltype(zero)>(launch, thread, kThreads);
  });
}

void rotate(const RotaryTokens& launch) {
  const int threads = rotary_threads(launch);
  with_row_format(launch.format, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t token = 0; token < launch.batch * launch.length; ++token) {
      for (int thread = 0; thread < threads; ++thread) {
        if (launch.vectors) {
          rotate_token<T, kVectorOf<T>>(launch, token, thread, threads);
        } else {
          rotate_token<T, 1>(launch, token, thread, threads);
        }
      }
    }
  });
}

void cross_entropy(const CrossEntropyRows& launch) {
  for (int64_t row = 0; row < launch.rows; ++row) {
    TORCH_CHECK(launch.labels[row] < launch.width, "label ", launch.labels[row],
                " lies outside the model's vocabulary of ", launch.width,
                ": the data were tokenised with another tokenizer than the model's");
  }
  with_row_format(launch.format, [&](auto zero) { run_rows<CrossEntropyThreads<decltype(zero)>>(launch); });
}

void cross_entropy_grad(const CrossEntropyGradRows& launch) {
  with_row_format(launch.format, [&](auto zero) {
    using Threads = CrossEntropyGradThreads<decltype(zero)>;
    for (int64_t block = 0; block < launch.rows * launch.tiles_per_row(); ++block) {
      for (int thread = 0; thread < Threads::kThreads; ++thread) Threads::run(launch, block, thread);
    }
  });
}

}  // namespace on_host

namespace {

const GpuKernels* kernels_of_module = nullptr;

}  // namespace

void set_gpu_kernels(const GpuKernels& kernels) {
  static const GpuKernels kept = kernels;
  kernels_of_module = &kept;
}

const GpuKernels& gpu_kernels() {
  static const GpuKernels kernels = [] {
    cuda_kernels();  // loads the module
    TORCH_INTERNAL_ASSERT(kernels_of_module != nullptr);
    return *kernels_of_module;
  }();
  return kernels;
}

const GpuKernels& host_kernels() {
  static const GpuKernels kernels{.rms_norm = on_host::rms_norm,
                                  .rms_norm_grad = on_host::rms_norm_grad,
                                  .head_norm = on_host::head_norm,
                                  .head_norm_grad = on_host::head_norm_grad,
                                  .swiglu = on_host::swiglu<SwigluElements>,
                                  .swiglu_grad = on_host::swiglu<SwigluGradElements>,
                                  .rotate = on_host::rotate,
                                  .cross_entropy = on_host::cross_entropy,
                                  .cross_entropy_grad = on_host::cross_entropy_grad};
  return kernels;
}

}  // namespace megashard::gpu
