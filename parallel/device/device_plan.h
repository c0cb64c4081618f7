#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace megashard {

/// A GPU, its links and its network as a plan takes them (docs/plan.md). Bytes, seconds, FLOP/s.
struct DeviceModel {
  struct AttentionShare {
    int64_t channels = 0;  ///< of a head
    double forward = 0, backward = 0;
  };
  /// A measured product [m, k] x [k, n] of elements of so many bits.
  struct Product {
    int64_t bits = 0, m = 0, n = 0, k = 0;
    double flops = 0;  ///< a second
  };

  std::string name;
  int64_t memory_bytes = 0;
  int64_t program_memory = 0;                      ///< of a CPU: resident besides tensors; 0: a GPU
  double flops_8 = 0, flops_16 = 0, flops_32 = 0;  ///< dense peaks of products, by bits
  double product_share = 1;                        ///< of the peak that the best product reaches
  std::vector<Product> products;                   ///< all of a few m, n and k; of bits without any, the peaks count
  int64_t multiprocessors = 1;
  std::vector<AttentionShare> attention;     ///< of the peak that long causal sequences reach
  std::vector<AttentionShare> attention_16;  ///< in 16 bits; empty: the same
  double memory_bandwidth = 0, memory_share = 1;
  std::map<std::string, double> operators;           ///< bytes a second of those that were measured, by their names
  std::map<std::string, double> operators_16;        ///< of mostly 16-bit elements; those without are in `operators`
  double kernel_start = 0;                           ///< between two kernels of a stream
  double host_launch = 0;                            ///< of the host, for one operator
  int64_t node_devices = 1;                          ///< that node_bandwidth joins
  double node_bandwidth = 0, network_bandwidth = 0;  ///< of collectives, of one device
  double node_latency = 0, network_latency = 0;      ///< of one step of a collective
  double host_bandwidth = 0;                         ///< between a device and its host
  double host_memory_bandwidth = 0;                  ///< of a device's share of its host
  double storage_bandwidth = 0;                      ///< of a node
};

struct CollectiveTotal {
  std::string kind;  ///< "all_gather"
  int64_t count = 0;
  int64_t bytes = 0;  ///< of the larger tensor of each
  double seconds = 0;
};

/// One operation on a stream of the planned device.
struct PlannedSpan {
  int stream = 0;  ///< 0: computes
  std::string name, unit;
  double begin = 0, seconds = 0;
};

/// What a planned device has done since the last question.
struct PlanTotals {
  double seconds = 0;          ///< by the clock of the stream that computes
  double host_seconds = 0;     ///< of launches; what the host waited for is not in it
  double exposed_seconds = 0;  ///< that this stream stood still because of other streams
  std::vector<CollectiveTotal> collectives;
  std::vector<PlannedSpan> spans;  ///< where they are kept
};

/// A device of shapes without memory: operators have sizes and times, and no values.
struct DevicePlan {
  void (*begin)(const DeviceModel& model, bool keeps_spans);
  PlanTotals (*take_totals)();
  /// Calls it, with the name of the operation, whenever tensors take more memory than ever before: what is in use, of
  /// a CPU what is resident, free blocks that it keeps too.
  void (*observe_peak)(std::function<void(const std::string& operation, int64_t bytes)> observer);
  void (*host_passes)(int64_t bytes);  ///< over its memory
};

/// Makes the simulated device one of shapes for as long as the process lives, before anything is made on it; a further
/// plan may begin when all of the one before is gone.
DevicePlan begin_device_plan(const DeviceModel& model, bool keeps_spans);
/// Of a plan: notes that the host passes over so many bytes of its memory, and returns true; no values are there, and
/// none come. Else false.
bool plan_host_pass(int64_t bytes);
/// Whether it is: of the operators that this project brings it has those with a kernel for GPUs.
bool device_is_planned();
/// Whether collectives and memory are a CPU's: on one, and in a plan of one (DeviceModel::program_memory).
bool acts_as_cpu(c10::Device device);

}  // namespace megashard
