#include "framework/arguments/parallel_arguments.h"

#include <algorithm>
#include <array>
#include <string>

#include "framework/arguments/argument_validation.h"
#include "framework/arguments/context_parallel_arguments.h"
#include "framework/arguments/nearest_name.h"
#include "framework/arguments/option_group.h"
#include "framework/mistakes.h"

namespace megashard::detail {
namespace {

using A = Arguments;
using std::to_string;

void derive_parallel(Arguments& arguments, const RunEnvironment& environment, Mistakes& rules) {
  arguments.world_size = environment.world_size;
  arguments.rank = environment.rank;
  const int64_t pieces = arguments.tensor_model_parallel_size;
  const auto divides = [&](int64_t ranks, const std::string& of_them, const char* flag, int64_t size) {
    if (size <= 0) return false;
    return rules.require(ranks % size == 0, of_them + to_string(ranks) + " is not divisible by " + flag + " " +
                                                to_string(size) + "; change one of them.");
  };
  if (!divides(arguments.world_size, "world size ", "--tensor-model-parallel-size", pieces)) return;
  const int64_t ranks = arguments.world_size / pieces;
  const std::string of_them = pieces == 1 ? "world size " : "world size / --tensor-model-parallel-size = ";
  divides(ranks, of_them, "--expert-model-parallel-size", arguments.expert_model_parallel_size);
  if (divides(ranks, of_them, "--context-parallel-size", arguments.context_parallel_size))
    arguments.data_parallel_size = ranks / arguments.context_parallel_size;
}

void check_sequence_parallel(Arguments& arguments, const DiagnosticSink& sink, Mistakes& rules) {
  if (arguments.sequence_parallel && arguments.tensor_model_parallel_size == 1) {
    arguments.sequence_parallel = false;
    sink(Severity::kNotice, "--sequence-parallel has no effect: it needs --tensor-model-parallel-size above 1; "
                            "--context-parallel-size shares sequences without it");
  }
  if (!arguments.sequence_parallel || !arguments.seq_length) return;
  const int64_t parts = arguments.tensor_model_parallel_size * arguments.context_parallel_size;
  rules.require(*arguments.seq_length % parts == 0,
                "--seq-length " + to_string(*arguments.seq_length) + " is not divisible by the " + to_string(parts) +
                    " ranks that share a sequence with --sequence-parallel (--tensor-model-parallel-size * "
                    "--context-parallel-size); change it, or leave --sequence-parallel out.");
}

void check_fsdp2(const Arguments& arguments, bool on_gpu, const RunEnvironment& environment, Mistakes& rules) {
  rules.require(
      !arguments.fsdp2_config_path || arguments.use_torch_fsdp2,
      "--fsdp2-config-path " + arguments.fsdp2_config_path.value_or("") + " needs --use-torch-fsdp2; add it.");
  rules.require(!arguments.fsdp2_config_strict || arguments.fsdp2_config_path,
                "--fsdp2-config-strict needs --fsdp2-config-path, the file that it checks.");
  rules.require(arguments.fsdp2_plan == "off" || arguments.use_torch_fsdp2,
                "--fsdp2-plan " + arguments.fsdp2_plan + " needs --use-torch-fsdp2; add it.");
  rules.require(!arguments.fsdp2_plan_memory_mib || arguments.fsdp2_plan == "auto",
                "--fsdp2-plan-memory-mib is for --fsdp2-plan auto, which has to be given too.");
  rules.require(arguments.use_torch_fsdp2 || arguments.world_size == 1,
                "world size is " + to_string(arguments.world_size) +
                    ", which needs --use-torch-fsdp2; sharding_size: 1 in the FSDP2 file replicates the "
                    "model instead.");
  const bool one_connection = environment.cuda_device_max_connections == "1";
  rules.require(!on_gpu || !arguments.use_torch_fsdp2 || !one_connection,
                "CUDA_DEVICE_MAX_CONNECTIONS is 1, which keeps FSDP2's collectives from overlapping "
                "compute; unset it.");
}

void check_backend(const Arguments& arguments, const RunParts& parts, bool on_gpu, Mistakes& rules) {
  const auto& backend = *arguments.distributed_backend;
  if (!rules.require(
          backend.find("hccl") == backend.npos,
          "--distributed-backend " + backend + " is for NPUs, which this program does not drive; use nccl or gloo."))
    return;
  constexpr std::array kKnown = {"nccl", "gloo", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"};
  const auto hint = did_you_mean(backend, {kKnown.begin(), kKnown.end()});
  if (!rules.require(std::find(kKnown.begin(), kKnown.end(), backend) != kKnown.end(),
                     "--distributed-backend " + backend + " is unknown; use nccl, gloo or cpu:gloo,cuda:nccl" +
                         (hint.empty() ? "." : hint)))
    return;
  rules.require(
      on_gpu || backend == "gloo",
      "--distributed-backend " + backend + " needs GPUs, but this run is on CPUs; use gloo or leave the flag out.");
  const std::string of_cpu = parts.serves ? "serve" : (arguments.async_save ? "--async-save" : "--publish-weights");
  rules.require(backend != "nccl" || !(parts.serves || arguments.async_save || arguments.publish_weights),
                of_cpu + " needs a backend for the CPU, over which its threads agree; use --distributed-backend "
                         "cpu:gloo,cuda:nccl or leave the flag out.");
}

bool is_gpu(DeviceChoice device, bool has_gpu) {
  switch (device) {
    case DeviceChoice::kAuto:
      return has_gpu;
    case DeviceChoice::kCpu:
      return false;
    case DeviceChoice::kCuda:
    case DeviceChoice::kSim:
      return true;
  }
  return false;
}

bool derive_device(Arguments& arguments, const RunEnvironment& environment, const RunParts& parts, Mistakes& rules) {
  rules.require(arguments.device != DeviceChoice::kCuda || environment.has_gpu,
                "--device cuda needs a GPU, and this machine has none that can be used; leave it out or "
                "use --device cpu.");
  const bool on_gpu = is_gpu(arguments.device, environment.has_gpu);
  if (!arguments.distributed_backend) {
    const bool needs_cpu = parts.serves || arguments.save || arguments.async_save || arguments.publish_weights;
    const char* on_gpus = needs_cpu ? "cpu:gloo,cuda:nccl" : "nccl";
    arguments.distributed_backend = on_gpu ? on_gpus : "gloo";
  }
  check_backend(arguments, parts, on_gpu, rules);
  return on_gpu;
}

void check_determinism(const Arguments& arguments, bool on_gpu, const RunEnvironment& environment, Mistakes& rules) {
  if (!arguments.deterministic_mode || !on_gpu || arguments.world_size == 1) return;
  constexpr std::array kDeterministic = {"Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS"};
  const auto& algorithm = environment.nccl_algo;
  const bool known =
      algorithm && std::find(kDeterministic.begin(), kDeterministic.end(), *algorithm) != kDeterministic.end();
  rules.require(known, "--deterministic-mode needs NCCL_ALGO to be one of Tree, Ring, CollnetDirect, "
                       "CollnetChain, ^NVLS, "
                       "but it is " +
                           algorithm.value_or("not set") + "; NCCL may otherwise choose another order of addition.");
}

}  // namespace

void add_parallel_options(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("distributed", rows);
  group.add("--use-torch-fsdp2", &A::use_torch_fsdp2, kFree, "shard parameters, gradients and optimizer state");
  group.add("--fsdp2-config-path", &A::fsdp2_config_path, kFree, "the FSDP2 file; see fsdp2_config.yaml")
      .shown_as("FILE");
  group.add("--fsdp2-config-strict", &A::fsdp2_config_strict, kFree,
            "fail on an unknown key or a pattern without a match in the FSDP2 file");
  group
      .add("--fsdp2-plan", &A::fsdp2_plan, kFree,
           "plan of units and prefetch: a FILE; auto: searched in the first ten steps, and kept if steps get faster")
      .shown_as("auto|off|FILE");
  group
      .add("--fsdp2-plan-memory-mib", &A::fsdp2_plan_memory_mib, kFree,
           "additional MiB per rank that an auto plan may use; unset: a tenth of the peak")
      .shown_as("MIB")
      .at_least(0);
  group
      .add("--fsdp-schedule-trace", &A::fsdp_schedule_trace, kFree,
           "folder for rank_N.json: timeline of gathers and reductions of the first steps, for chrome://tracing")
      .shown_as("DIR");
  group
      .add("--no-reduce-scatter-during-grad-accumulation", &A::reduce_scatter_during_grad_accumulation, kFree,
           "keep gradients unsharded until the last microbatch: less communication, more memory")
      .turns_off()
      .named("reduce_scatter_during_grad_accumulation");
  group
      .add("--freeze-module-prefix", &A::freeze_module_prefix, kFree,
           "freeze parameters whose names begin with one of these: model.embed_tokens model.layers.0.")
      .shown_as("NAME");
  group
      .add("--freeze-modules", &A::freeze_modules, kFree,
           "modules to freeze, by patterns of MindSpeed's native route: model.visual model.layers.{0-3}")
      .shown_as("PATTERN");
  group.choice("--device", &A::device, kFree,
               {{"auto", DeviceChoice::kAuto},
                {"cpu", DeviceChoice::kCpu},
                {"cuda", DeviceChoice::kCuda},
                {"sim", DeviceChoice::kSim}},
               "auto: cuda if there is a GPU; sim: a CUDA device emulated on the CPU, which detects races");
  group
      .add("--check-collective-order", &A::check_collective_order, kFree,
           "check in the first 3 steps and every N steps that all ranks gather and reduce the same units in the same "
           "order; 0: never; unset: in the first 3")
      .shown_as("N")
      .at_least(0);
  group.add("--log-host-syncs", &A::log_host_syncs, kFree, "after each step, what made the host wait for the device");
  group
      .add("--distributed-backend", &A::distributed_backend, kFree,
           "nccl, gloo, or cpu:gloo,cuda:nccl; unset: by the device")
      .shown_as("NAME");
  group.add("--distributed-timeout-minutes", &A::distributed_timeout_minutes, kFree, "deadline of every collective")
      .above(0);
  group
      .add("--distributed-init-method", &A::distributed_init_method, kFree,
           "tcp://HOST:PORT or file://PATH; unset: env:// (MASTER_ADDR, MASTER_PORT)")
      .shown_as("URL");
  group.add("--local-rank", &A::local_rank, kFree,
            "rank on this machine and index of its GPU, if the launcher does not set it");
  group
      .add("--tensor-model-parallel-size", &A::tensor_model_parallel_size, kFree,
           "number of ranks that share each layer; FSDP2 shards their pieces over the others")
      .above(0);
  group.add("--pipeline-model-parallel-size", &A::pipeline_model_parallel_size, kFree, "")
      .refuse("pipeline parallelism is not part of this program, which shards over all ranks by FSDP2; "
              "leave it out")
      .unless("1");
  add_context_parallel_options(rows);
  group.add("--expert-model-parallel-size", &A::expert_model_parallel_size, kFree, "ranks that share the experts")
      .above(0);
  group.add("--sequence-parallel", &A::sequence_parallel, kFree,
            "between tensor-parallel layers each rank has a part of the sequence");
  group.add("--no-gradient-accumulation-fusion", &A::gradient_accumulation_fusion, kFree, "")
      .turns_off()
      .named("gradient_accumulation_fusion")
      .no_effect("gradients are never accumulated by a fused kernel here");
  group.computed("world_size", &A::world_size);
  group.computed("rank", &A::rank);
  group.computed("data_parallel_size", &A::data_parallel_size);
}

void validate_parallel(Arguments& arguments, const RunEnvironment& environment, const RunParts& parts,
                       const DiagnosticSink& sink, Mistakes& rules) {
  if (!parts.training) arguments.sequence_parallel = false;  // prompts are of any length; the numbers are the same
  derive_parallel(arguments, environment, rules);
  check_sequence_parallel(arguments, sink, rules);
  const bool on_gpu = derive_device(arguments, environment, parts, rules);
  check_fsdp2(arguments, on_gpu, environment, rules);
  check_determinism(arguments, on_gpu, environment, rules);
}

}  // namespace megashard::detail
