#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "framework/diagnostics.h"

namespace megashard {

struct Arguments;
struct Option;
struct RunEnvironment;
struct RunParts;
class Mistakes;

enum class DeviceChoice {
  kAuto,
  kCpu,
  kCuda,
  kSim,  ///< a CUDA device simulated on the CPU
};

/// Parallelism and devices of a run. (derived): computed by validate_arguments.
struct DistributedArguments {
  int64_t tensor_model_parallel_size = 1;
  int64_t pipeline_model_parallel_size = 1;
  int64_t expert_model_parallel_size = 1;  // or set by the FSDP2 file
  bool sequence_parallel = false;
  std::optional<std::string> distributed_backend;  // (derived) nccl with GPUs, gloo without
  int64_t distributed_timeout_minutes = 10;
  std::optional<std::string> distributed_init_method;  // tcp://HOST:PORT, file://PATH; unset: env://
  std::optional<int64_t> local_rank;
  DeviceChoice device = DeviceChoice::kAuto;
  bool use_torch_fsdp2 = false;
  std::optional<std::string> fsdp2_config_path;
  bool fsdp2_config_strict = false;
  std::string fsdp2_plan = "off";                 // auto, off, or a file
  std::optional<int64_t> fsdp2_plan_memory_mib;   // extra memory of an auto plan; unset: a tenth of the peak
  std::optional<int64_t> check_collective_order;  // interval in steps, and the first 3; 0: never; unset: first 3
  bool reduce_scatter_during_grad_accumulation = true;
  std::vector<std::string> freeze_module_prefix;  // prefixes of parameter names
  std::vector<std::string> freeze_modules;        // patterns of module paths
  bool gradient_accumulation_fusion = true;       // Megatron's default; not applicable here
  int64_t world_size = 1;                         // (derived)
  int64_t rank = 0;                               // (derived)
  int64_t data_parallel_size = 1;                 // (derived)
};

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_parallel_options(std::vector<Option>& rows);
/// Validates world size, device, backend and FSDP2 flags.
void validate_parallel(Arguments& arguments, const RunEnvironment& environment, const RunParts& parts,
                       const DiagnosticSink& sink, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
