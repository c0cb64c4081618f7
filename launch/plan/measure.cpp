#include "launch/plan/measure.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include "launch/plan/operator_times.h"
#include "launch/plan/quiet_callbacks.h"
#include "launch/train/session.h"
#include "models/kernels/fused_ops.h"
#include "parallel/device/cuda_module.h"

namespace megashard {
namespace {

constexpr std::array kTraining = {"pretrain",
                                  "--num-layers=1",
                                  "--hidden-size=64",
                                  "--num-attention-heads=1",
                                  "--seq-length=512",
                                  "--max-position-embeddings=512",
                                  "--vocab-size=100",
                                  "--tokenizer-type=NullTokenizer",
                                  "--swiglu",
                                  "--normalization=RMSNorm",
                                  "--position-embedding-type=rope",
                                  "--disable-bias-linear",
                                  "--micro-batch-size=1",
                                  "--lr=1e-4",
                                  "--mock-data",
                                  "--train-iters=2",
                                  "--eval-iters=0",
                                  "--use-torch-fsdp2"};

/// Resident file pages and allocated heap; free heap will be reused by tensors.
int64_t resident_now() {
  int64_t pages = 0, resident = 0, of_files = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident >> of_files;
  const auto heaps = ::mallinfo2();
  return of_files * ::sysconf(_SC_PAGESIZE) + static_cast<int64_t>(heaps.uordblks + heaps.hblkhd);
}

/// Resident bytes of a CPU training besides its tensors: program and libraries, arguments, data indices, threads, MKL
/// buffers. Measured in this process while it trains a network of less than 1 MiB. Collective.
int64_t program_memory(const ProcessGroupPtr& group) {
  const at::AutoGradMode grad(true);
  const DiagnosticSink quiet = [](Severity, const std::string&) {};
  const RunPlan plan =
      plan_run(parse_arguments(static_cast<int>(kTraining.size()), kTraining.data()), {},
               {.rank = group->rank(), .world_size = group->size(), .local_world_size = group->size()}, quiet);
  const Arguments& arguments = plan.arguments;
  const Session session = build_session(plan, ParallelGroups(arguments, group),
                                        {.source = WeightSource::kInitialisation, .initialises = true}, quiet);
  const auto vocab_size = session.model().vocab_size();
  int64_t most = 0;
  Trainer trainer(plan_training(arguments, data_options(arguments, vocab_size, vocab_size - 1)), session.model(),
                  session.groups, session.device, quiet_callbacks([&] { most = std::max(most, resident_now()); }));
  trainer.train();
  return most;
}

at::Tensor filled(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  return at::ones(sizes, at::dtype(dtype).device(device));
}

/// Name of the CPU from /proc.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(": ") + 2);
  }
  return "CPU";
}

/// A rank's share of the memory.
int64_t memory_of(c10::Device device, int ranks) {
  if (!device.is_cpu())
    return static_cast<int64_t>(c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).second);
  return int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE) / ranks;
}

/// Measures matrix products of a grid of sizes, as in models: x [m, k], weight [n, k]. Uses other weights each time,
/// because a model's are not in cache.
void measure_products(DeviceModel& model, const Stopwatch& watch, c10::Device device) {
  constexpr size_t kWeights = 16;
  std::vector<at::Tensor> weights(kWeights);
  const auto sizes = device.is_cpu() ? std::array<int64_t, 3>{32, 256, 1024} : std::array<int64_t, 3>{256, 1024, 8192};
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    double best = 0;
    for (const int64_t m : sizes) {
      for (const int64_t n : sizes) {
        for (const int64_t k : sizes) {
          const auto x = filled({m, k}, dtype, device);
          for (auto& each : weights) each = filled({n, k}, dtype, device);
          size_t calls = 0;
          const double seconds = watch.seconds_of([&] { linear(x, weights[calls++ % kWeights], at::Tensor()); });
          const double flops = 2.0 * static_cast<double>(m * n * k) / seconds;
          model.products.push_back({static_cast<int64_t>(8 * c10::elementSize(dtype)), m, n, k, flops});
          best = std::max(best, flops);
        }
      }
    }
    (dtype == at::kFloat ? model.flops_32 : model.flops_16) = best;
  }
  model.flops_8 = model.flops_16;  // fp8 products are not measured
}

/// Measures a large addition in place, and the smallest one.
void measure_memory(DeviceModel& model, const Stopwatch& watch, c10::Device device) {
  constexpr int64_t kLarge = 64 << 20;  // bytes; exceeds caches
  const auto a = filled({kLarge / 4}, at::kFloat, device), b = a.clone();
  model.memory_bandwidth = 3.0 * kLarge / watch.seconds_of([&] { a.add_(b); });
  const auto small = filled({1}, at::kFloat, device);
  const double smallest = watch.seconds_of([&] { small.add_(small); });
  // A CPU runs what it launches; for a GPU the host's time is that of a sequence of small kernels.
  model.kernel_start = device.is_cpu() ? smallest : smallest / 4;
  model.host_launch = device.is_cpu() ? 1e-9 : smallest;
  const auto host = at::ones({kLarge / 4}), other = host.clone();
  const Stopwatch on_host(c10::kCPU);
  model.host_memory_bandwidth = 3.0 * kLarge / on_host.seconds_of([&] { host.add_(other); });
  model.host_bandwidth = kLarge / watch.seconds_of([&] { a.copy_(host); });
}

/// Computes bandwidth and latency of a link from the times of a small and a large collective, in the plan's model of a
/// ring.
void measure_links(DeviceModel& model, const Stopwatch& watch, const ProcessGroupPtr& group, c10::Device device) {
  constexpr int64_t kSmall = 1 << 10, kLarge = 16 << 20;  // bytes in total
  constexpr int kCalls = 10;
  const auto ranks = static_cast<double>(group->size());
  model.node_devices = group->size();
  model.node_bandwidth = model.network_bandwidth = model.memory_bandwidth;
  model.node_latency = model.network_latency = 1e-6;
  if (group->size() == 1) return;
  const auto gather = [&](int64_t bytes) {
    const auto part = filled({bytes / 4 / group->size()}, at::kFloat, device);
    const auto whole = at::empty({part.numel() * group->size()}, part.options());
    group->barrier();
    return watch.seconds_of(kCalls, [&] { group->all_gather_into(whole, part).wait(); });
  };
  const double small = gather(kSmall), large = gather(kLarge);
  model.node_latency = model.network_latency = std::max(1e-7, (small - model.kernel_start) / (ranks - 1));
  model.node_bandwidth = model.network_bandwidth = kLarge * (ranks - 1) / ranks / std::max(large - small, 1e-6);
}

double storage_bandwidth(const std::filesystem::path& folder) {
  constexpr size_t kBytes = 256 << 20;
  const std::vector<char> data(kBytes, 1);
  std::string path = (folder.empty() ? std::filesystem::path(".") : folder) / "megashard_measure_XXXXXX";
  const int file = ::mkstemp(path.data());
  TORCH_CHECK(file >= 0, "no file can be made beside the one of --measure, to time the disk");
  const auto begin = std::chrono::steady_clock::now();
  const bool written = ::write(file, data.data(), kBytes) == static_cast<ssize_t>(kBytes) && ::fsync(file) == 0;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  ::close(file);
  ::unlink(path.c_str());
  TORCH_CHECK(written, "256 MiB cannot be written beside the file of --measure, to time the disk");
  return kBytes / seconds.count();
}

}  // namespace

DeviceModel measure_machine(const ProcessGroupPtr& group, const std::string& folder) {
  const at::NoGradGuard no_grad;
  const c10::Device device = device_of(group);
  const Stopwatch watch(device);
  DeviceModel model;
  model.name = device.is_cpu() ? cpu_name() : load_cuda_module().device_name(device.index());
  model.memory_bytes = memory_of(device, group->size());
  group->barrier();
  measure_products(model, watch, device);
  measure_memory(model, watch, device);
  measure_links(model, watch, group, device);
  measure_attention(model, watch, device);
  if (device.is_cpu()) {
    measure_operators(model, watch);
    model.program_memory = program_memory(group);
  }
  if (group->rank() == 0) model.storage_bandwidth = storage_bandwidth(folder);
  group->barrier();
  return model;
}

}  // namespace megashard
