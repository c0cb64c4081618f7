#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

namespace megashard {

/// TFLOP/s of each device.
double tflops_per_device(double flops, double seconds, int64_t world_size);

/// Dense peak of a GPU by its name ("NVIDIA H100 80GB HBM3"), in TFLOP/s; none for unknown GPUs and
/// other dtypes than bf16, fp16 and fp32 (without TF32).
std::optional<double> gpu_peak_tflops(const std::string& gpu_name, at::ScalarType dtype);

/// What a large matrix product reaches on this CPU with LibTorch's present number of threads, in TFLOP/s: in fp32, or
/// in bf16 where that is the dtype and faster. Takes 0.02 to 0.25 s.
double measured_cpu_tflops(at::ScalarType dtype);

}  // namespace megashard
