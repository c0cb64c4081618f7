#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace megashard {

struct Batch;
class MultiModalModule;

/// TFLOP/s of each device.
double tflops_per_device(double flops, double seconds, int64_t world_size);

/// Dense peak of a GPU by its name ("NVIDIA H100 80GB HBM3"), in TFLOP/s; none for unknown GPUs and
/// other dtypes than bf16, fp16 and fp32 (without TF32).
std::optional<double> gpu_peak_tflops(const std::string& gpu_name, at::ScalarType dtype);

/// What a large matrix product reaches on this CPU with LibTorch's present number of threads, in TFLOP/s: in fp32, or
/// in bf16 where that is the dtype and faster. Takes 0.02 to 0.25 s.
double measured_cpu_tflops(at::ScalarType dtype);

/// Counts what attention need not compute because it does not cross documents.
class DocumentFlops {
 public:
  /// `model` must outlive this. `ranks`: how many have the same batches.
  DocumentFlops(const MultiModalModule& model, int64_t sequence_length, int64_t ranks)
      : model_(model), sequence_length_(sequence_length), ranks_(ranks) {}

  /// FLOPs of whole sequences minus those of their documents, over all rows of the batches: this rank's share, 0
  /// without documents. Reads host memory only.
  double saved(const std::vector<Batch>& batches);

 private:
  double of_sequence(int64_t length);

  const MultiModalModule& model_;
  int64_t sequence_length_, ranks_;
  std::unordered_map<int64_t, double> of_length_{};  // forward and backward of one sequence
};

}  // namespace megashard
