#pragma once

#include <memory>
#include <optional>
#include <string>

#include "checkpoint/steps/checkpoint_directory.h"
#include "framework/arguments/arguments.h"
#include "framework/arguments/key_log.h"
#include "framework/diagnostics.h"
#include "framework/mistakes.h"
#include "framework/modules/deferred_init.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/process_group/launch_environment.h"
#include "framework/training/parallel_groups.h"
#include "launch/arguments/command_line.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// First steps of every program that runs a model.

/// Prints on rank 0. `arguments`: its current --logging-level is used for each message; null: prints all.
DiagnosticSink sink_for(int rank, const Arguments* arguments = nullptr);
/// Sharding of a run: from the FSDP2 file, ROLL's worker, or the defaults.
struct ShardingPlan {
  Fsdp2Config config;
  bool recompute_reentrant = false;  ///< for ROLL's worker
  bool recompute_towers = false;     ///< for ROLL's worker: also recomputes trained towers
};

/// Runs validate_arguments with this machine's GPUs and variables, reads the FSDP2 file (its keys: `log`) and checks
/// it. Takes the line's mistakes.
ShardingPlan validate_for_machine(CommandLine& line, const RendezvousOptions& environment, const DiagnosticSink& sink,
                                  KeyLog* log = nullptr);

/// Collective. The device_mapping of ROLL's worker selects the GPU of a rank.
ProcessGroupPtr join_world(const Arguments& arguments, const std::optional<RollWorker>& worker,
                           RendezvousOptions options);
/// The rank's device, selected by join_world.
c10::Device device_of(const ProcessGroupPtr& group);
void seed_generators(const Arguments& arguments, int rank, c10::Device device);

/// Source of the initial weights.
enum class WeightSource { kCheckpoint, kHuggingFace, kInitialisation };

struct Start {
  WeightSource source;
  CheckpointStep step{};     ///< for kCheckpoint
  bool initialises = false;  ///< the initial values of the layers are used
};

/// Collective. Converts --pretrained-checkpoint to --load and --finetune.
Start find_start(Arguments& arguments, const ProcessGroupPtr& group, const DiagnosticSink& sink);

struct BuiltModel {
  std::shared_ptr<MultiModalModule> model;
  std::unique_ptr<InitTape> tape;
};

/// Creates a model of models/ or of --model-plugin; its parameters have values if `initialises`.
BuiltModel build_model(const Arguments& arguments, bool initialises);
/// Freezes parameters: the model's own choice, --freeze-module-prefix and --freeze-modules. Call it before sharding.
void freeze_model(const Arguments& arguments, const BuiltModel& built, const DiagnosticSink& sink);
/// Loads Hugging Face weights, with --downcast-to-bf16. Collective.
void load_first_weights(const Arguments& arguments, const BuiltModel& built, const ProcessGroupPtr& group,
                        const DiagnosticSink& sink);
/// Sets up recompute, shards the model, and returns its compute dtype. Collective.
at::ScalarType shard_model(const Arguments& arguments, const ShardingPlan& plan, const BuiltModel& built,
                           const ParallelGroups& groups, bool initialises, const DiagnosticSink& sink);

}  // namespace megashard
