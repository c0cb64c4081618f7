#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace megashard {

/// Model of a GPU, its links and its network for plans (docs/plan.md). Units: bytes, seconds, FLOP/s.
struct DeviceModel {
  struct AttentionShare {
    int64_t channels = 0;  ///< head width
    double forward = 0, backward = 0;
  };
  /// Measured product [m, k] x [k, n] with elements of `bits` bits.
  struct Product {
    int64_t bits = 0, m = 0, n = 0, k = 0;
    double flops = 0;  ///< per second
  };

  std::string name;
  int64_t memory_bytes = 0;
  int64_t program_memory = 0;                      ///< CPU: resident memory besides tensors; 0: a GPU
  double flops_8 = 0, flops_16 = 0, flops_32 = 0;  ///< dense peak of products, by bits
  double product_share = 1;                        ///< part of the peak that the best product reaches
  std::vector<Product> products;                   ///< all combinations of a few m, n and k; without products of some
                                                   ///< bits, the peaks count
  int64_t multiprocessors = 1;
  std::vector<AttentionShare> attention;     ///< part of the peak that long causal sequences reach
  std::vector<AttentionShare> attention_16;  ///< the same in 16 bits; empty: as `attention`
  double memory_bandwidth = 0, memory_share = 1;
  std::map<std::string, double> operators;           ///< bytes per second of measured operators, by name
  std::map<std::string, double> operators_16;        ///< for mostly 16-bit elements; falls back to `operators`
  double kernel_start = 0;                           ///< gap between two kernels of a stream
  double host_launch = 0;                            ///< host time per operator
  int64_t node_devices = 1;                          ///< devices joined by node_bandwidth
  double node_bandwidth = 0, network_bandwidth = 0;  ///< of collectives, per device
  double node_latency = 0, network_latency = 0;      ///< per step of a collective
  double host_bandwidth = 0;                         ///< between a device and its host
  double host_memory_bandwidth = 0;                  ///< a device's share of its host's
  double storage_bandwidth = 0;                      ///< per node
};

struct CollectiveTotal {
  std::string kind;  ///< "all_gather"
  int64_t count = 0;
  int64_t bytes = 0;  ///< of each collective's larger tensor
  double seconds = 0;
};

/// One operation on a stream of the planned device.
struct PlannedSpan {
  int stream = 0;  ///< 0: compute
  std::string name, unit;
  double begin = 0, seconds = 0;
};

/// Totals of a planned device since the last call.
struct PlanTotals {
  double seconds = 0;          ///< clock of the compute stream
  double host_seconds = 0;     ///< launches, without waits
  double exposed_seconds = 0;  ///< idle time of the compute stream due to other streams
  std::vector<CollectiveTotal> collectives;
  std::vector<PlannedSpan> spans;  ///< if kept
};

/// A device with shapes but no memory: operators have sizes and times but no values.
struct DevicePlan {
  void (*begin)(const DeviceModel& model, bool keeps_spans);
  PlanTotals (*take_totals)();
  /// Calls `observer` with the operation's name whenever memory reaches a new peak: tensors in use; on a CPU, resident
  /// memory, including the free blocks it keeps.
  void (*observe_peak)(std::function<void(const std::string& operation, int64_t bytes)> observer);
  void (*host_passes)(int64_t bytes);  ///< passes of the host over its memory
};

/// Turns the simulated device into a planned one for the life of the process; call before anything is created on it.
/// Another plan may begin once everything of the previous one is gone.
DevicePlan begin_device_plan(const DeviceModel& model, bool keeps_spans);
/// In a plan, records that the host passes over `bytes` bytes of memory and returns true: there are no values to read
/// or write. Else returns false.
bool plan_host_pass(int64_t bytes);
/// True in a plan. Of this project's operators, a planned device has those with a GPU kernel.
bool device_is_planned();
/// True if collectives and memory are a CPU's: on a CPU, and in a plan of one (DeviceModel::program_memory).
bool acts_as_cpu(c10::Device device);

}  // namespace megashard
