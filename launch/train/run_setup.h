#pragma once

#include <memory>
#include <optional>
#include <string>

#include "checkpoint/steps/checkpoint_directory.h"
#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"
#include "framework/mistakes.h"
#include "framework/modules/deferred_init.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/process_group/launch_environment.h"
#include "launch/roll/roll_worker.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// What every program that runs a model does first.

/// Prints on rank 0.
DiagnosticSink sink_for(int rank);
/// How the run shards its model: by the FSDP2 file, by ROLL's worker, or by the defaults.
struct ShardingPlan {
  Fsdp2Config config;
  bool recompute_reentrant = false;  ///< what ROLL's worker recomputes
};

/// validate_arguments with this machine's GPUs and variables, and what is wrong with the FSDP2
/// file, which is read here.
ShardingPlan validate_for_machine(Arguments& arguments, const std::optional<RollWorker>& worker,
                                  const RendezvousOptions& environment, const DiagnosticSink& sink, Mistakes found);

/// Collective.
ProcessGroupPtr join_world(const Arguments& arguments, RendezvousOptions options);
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
/// By the model itself and by --freeze-module-prefix; before it is sharded.
void freeze_model(const Arguments& arguments, const BuiltModel& built, const DiagnosticSink& sink);
/// Recomputes, shards; the dtype that the model computes in. Throws UsageError for a
/// training in fp16. Collective.
at::ScalarType shard_model(const Arguments& arguments, const ShardingPlan& plan, const BuiltModel& built,
                           const ProcessGroupPtr& group, bool initialises, const DiagnosticSink& sink);

}  // namespace megashard
