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

/// What every program that runs a model does first.

/// Prints on rank 0.
/// `arguments`: whose --logging-level counts, as it is when something is told; null: all is told.
DiagnosticSink sink_for(int rank, const Arguments* arguments = nullptr);
/// How the run shards its model: by the FSDP2 file, by ROLL's worker, or by the defaults.
struct ShardingPlan {
  Fsdp2Config config;
  bool recompute_reentrant = false;  ///< what ROLL's worker recomputes
  bool recompute_towers = false;     ///< likewise: towers that are trained too
};

/// validate_arguments with this machine's GPUs and variables, and what is wrong with the FSDP2
/// file, which is read here (its keys: `log`). Takes the line's mistakes.
ShardingPlan validate_for_machine(CommandLine& line, const RendezvousOptions& environment, const DiagnosticSink& sink,
                                  KeyLog* log = nullptr);

/// Collective. The device_mapping of ROLL's worker chooses the GPU of a rank.
ProcessGroupPtr join_world(const Arguments& arguments, const std::optional<RollWorker>& worker,
                           RendezvousOptions options);
/// The rank's own, which join_world chose.
c10::Device device_of(const ProcessGroupPtr& group);
void seed_generators(const Arguments& arguments, int rank, c10::Device device);

/// Where the first weights come from.
enum class WeightSource { kCheckpoint, kHuggingFace, kInitialisation };

struct Start {
  WeightSource source;
  CheckpointStep step{};     ///< of kCheckpoint
  bool initialises = false;  ///< the layers' first values count
};

/// Collective; --pretrained-checkpoint becomes --load and --finetune.
Start find_start(Arguments& arguments, const ProcessGroupPtr& group, const DiagnosticSink& sink);

struct BuiltModel {
  std::shared_ptr<MultiModalModule> model;
  std::unique_ptr<InitTape> tape;
};

/// A model of models/ or of --model-plugin; its parameters have values if `initialises`.
BuiltModel build_model(const Arguments& arguments, bool initialises);
/// By the model itself, --freeze-module-prefix and --freeze-modules; before it is sharded.
void freeze_model(const Arguments& arguments, const BuiltModel& built, const DiagnosticSink& sink);
/// Hugging Face weights, with --downcast-to-bf16. Collective.
void load_first_weights(const Arguments& arguments, const BuiltModel& built, const ProcessGroupPtr& group,
                        const DiagnosticSink& sink);
/// Recomputes, shards; the dtype that the model computes in. Collective.
at::ScalarType shard_model(const Arguments& arguments, const ShardingPlan& plan, const BuiltModel& built,
                           const ParallelGroups& groups, bool initialises, const DiagnosticSink& sink);

}  // namespace megashard
