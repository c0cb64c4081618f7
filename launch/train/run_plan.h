#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "checkpoint/hugging_face/hf_config.h"
#include "framework/arguments/argument_validation.h"
#include "framework/arguments/arguments.h"
#include "framework/arguments/key_log.h"
#include "framework/diagnostics.h"
#include "framework/modules/fsdp2_config.h"
#include "launch/arguments/command_line.h"
#include "models/float8/float8_layers.h"
#include "parallel/collectives/rendezvous.h"

namespace megashard {

/// Sharding of a run: from the FSDP2 file, ROLL's worker, or the defaults.
struct ShardingPlan {
  Fsdp2Config config;
  Strictness strictness = Strictness::kWarn;  ///< towards unknown keys and patterns without a match
  bool recompute_reentrant = false;           ///< for ROLL's worker
  bool recompute_towers = false;              ///< for ROLL's worker: also recomputes trained towers
};

/// A run whose arguments are complete and checked. Programs keep it const.
struct RunPlan {
  Arguments arguments;
  ShardingPlan sharding;
  Float8Modules float8_modules{};         ///< with --fp8-format
  std::optional<HfConfig> hf_config{};    ///< --hf-model's config.json
  bool trains = true;                     ///< has optimizer steps
  std::vector<int64_t> device_mapping{};  ///< of ROLL's worker: the GPU of each rank; empty: by the launcher
};

/// Completes the arguments of a command line for these parts of a run and checks them: ROLL's worker, MindSpeed-MM's
/// files, --use-checkpoint-args, this machine and its ranks, the FSDP2 file, config.json of --hf-model. Without
/// training, options that only pretrain reads have their defaults. Throws UsageErrors. The four functions below are
/// its steps.
RunPlan plan_run(CommandLine line, const RunParts& parts, const RendezvousOptions& ranks, const DiagnosticSink& sink);

/// Applies ROLL's worker and MindSpeed-MM's files, which depend on the number of ranks and on the data.
void apply_files(CommandLine& line, const RunParts& parts, int64_t world_size, const DiagnosticSink& sink);
/// Without --seq-length a folder of latents says it: the patches of its largest sample.
void take_length_of_latents(Arguments& arguments);
/// Runs validate_arguments with this machine's GPUs and variables, and reads and checks the FSDP2 file (its keys:
/// `log`). config.json is not read yet.
RunPlan validate_run(CommandLine line, const RunParts& parts, const RendezvousOptions& ranks,
                     const DiagnosticSink& sink, KeyLog* log = nullptr);

}  // namespace megashard
