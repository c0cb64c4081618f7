#include "framework/training/flops.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>

#include "framework/batch.h"
#include "framework/matrix_product.h"
#include "framework/modules/multi_modal_module.h"

namespace megashard {

namespace {

constexpr double kTera = 1e12;

struct GpuPeak {
  const char* name;  // words of the device's name; more special ones first
  double half;       // bf16 and fp16, dense
  double single;     // fp32
};

// From the vendor's data sheets.
constexpr GpuPeak kGpuPeaks[] = {
    {"GB200", 2500.0, 80.0},   {"B200", 2250.0, 75.0},    {"H200", 989.4, 66.9},    {"H100 PCIe", 756.0, 51.2},
    {"H100 NVL", 835.5, 60.0}, {"H100", 989.4, 66.9},     {"GH200", 989.4, 66.9},   {"H800", 989.4, 66.9},
    {"H20", 148.0, 44.0},      {"A100", 312.0, 19.5},     {"A800", 312.0, 19.5},    {"A40", 149.7, 37.4},
    {"A30", 165.0, 10.3},      {"A10", 125.0, 31.2},      {"L40S", 362.1, 91.6},    {"L40", 181.1, 90.5},
    {"L4", 121.0, 30.3},       {"RTX 4090", 165.2, 82.6}, {"RTX 3090", 71.0, 35.6},
};

}  // namespace

double tflops_per_device(double flops, double seconds, int64_t world_size) {
  return flops / (seconds * kTera * static_cast<double>(world_size));
}

std::optional<double> gpu_peak_tflops(const std::string& gpu_name, at::ScalarType dtype) {
  const bool half = dtype == at::kBFloat16 || dtype == at::kHalf;
  if (!half && dtype != at::kFloat) return std::nullopt;
  std::string words = " " + gpu_name + " ";
  std::replace(words.begin(), words.end(), '-', ' ');
  const auto has = [&words](const std::string& name) { return words.find(" " + name + " ") != words.npos; };
  if (has("Laptop")) return std::nullopt;  // slower than the card of that name
  for (const auto& peak : kGpuPeaks) {
    if (has(peak.name)) return half ? peak.half : peak.single;
  }
  return std::nullopt;
}

namespace {

double product_tflops(at::ScalarType dtype) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kSize = 768;
  constexpr double kProductFlops = 2.0 * kSize * kSize * kSize;
  constexpr auto kLongest = std::chrono::milliseconds(100);
  constexpr int kNoFaster = 3;  // in a row: the best is found
  const auto a = at::ones({kSize, kSize}, dtype), b = at::ones({kSize, kSize}, dtype);
  matrix_product(a, b);  // threads and code generation
  double best = 0.0;
  const auto begin = Clock::now();
  for (int no_faster = 0; no_faster < kNoFaster && Clock::now() - begin < kLongest;) {
    const auto start = Clock::now();
    matrix_product(a, b);
    const std::chrono::duration<double> seconds = Clock::now() - start;
    const double rate = kProductFlops / (seconds.count() * kTera);
    no_faster = rate > 1.02 * best ? 0 : no_faster + 1;
    best = std::max(best, rate);
  }
  return best;
}

}  // namespace

double measured_cpu_tflops(at::ScalarType dtype) {
  const double single = product_tflops(at::kFloat);
  return dtype == at::kBFloat16 ? std::max(single, product_tflops(dtype)) : single;
}

double DocumentFlops::of_sequence(int64_t length) {
  const auto [known, is_new] = of_length_.try_emplace(length);
  if (is_new) known->second = model_.training_flops(1, length);
  return known->second;
}

double DocumentFlops::saved(const std::vector<Batch>& batches) {
  double saved = 0;
  for (const Batch& batch : batches) {
    if (!batch.document_lengths.defined()) continue;
    saved += static_cast<double>(batch.rows()) * of_sequence(sequence_length_);
    const auto* lengths = batch.document_lengths.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < batch.document_lengths.numel(); ++i) saved -= of_sequence(lengths[i]);
  }
  return saved / static_cast<double>(ranks_);
}

}  // namespace megashard
