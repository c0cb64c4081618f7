#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

namespace megashard {

/// What the arithmetic of a dense transformer depends on.
struct TransformerShape {
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t ffn_hidden_size = 0;
  bool gated_mlp = false;  ///< swiglu: three matrices instead of two
  int64_t num_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_size = 0;
  int64_t vocab_size = 0;  ///< padded
};

/// Floating-point operations of forward and backward of `sequences` sequences, as Megatron counts
/// them: recompute is not counted, and of attention's scores the half that is causal.
double training_flops(const TransformerShape& shape, int64_t sequences, int64_t sequence_length);

/// TFLOP/s of each device.
double tflops_per_device(double flops, double seconds, int64_t world_size);

/// Dense peak of a GPU by its name ("NVIDIA H100 80GB HBM3"), in TFLOP/s; none for unknown GPUs and
/// other dtypes than bf16, fp16 and fp32 (without TF32).
std::optional<double> gpu_peak_tflops(const std::string& gpu_name, at::ScalarType dtype);

/// What a large matrix product reaches on this CPU with LibTorch's present number of threads, in TFLOP/s: in fp32, or
/// in bf16 where that is the dtype and faster. Takes 0.02 to 0.25 s.
double measured_cpu_tflops(at::ScalarType dtype);

}  // namespace megashard
