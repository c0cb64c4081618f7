#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/steps/checkpoint_directory.h"
#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"
#include "framework/modules/deferred_init.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/process_group/launch_environment.h"
#include "framework/training/parallel_groups.h"
#include "launch/train/run_plan.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

// First steps of every program that runs a model.

/// Prints on rank 0 what is not below --logging-level; unset: all.
DiagnosticSink sink_for(int rank, std::optional<int64_t> logging_level = std::nullopt);

/// This rank's place in the world, from the launcher's variables and --local-rank, --distributed-init-method.
RendezvousOptions ranks_of_launcher(const Arguments& arguments);
/// Joins the ranks with the run's backend, deadline and device_mapping. Collective.
ProcessGroupPtr join_world(const RunPlan& plan, RendezvousOptions options);
/// Joins the ranks. Tells on the first rank of each host, or on a rank that waits long, what it waits for. Collective.
ProcessGroupPtr join_world(RendezvousOptions options);
/// The rank's device, selected by join_world.
c10::Device device_of(const ProcessGroupPtr& group);
void seed_generators(const Arguments& arguments, int rank, c10::Device device);

/// Source of the initial weights.
enum class WeightSource { kCheckpoint, kHuggingFace, kInitialisation };

struct Start {
  WeightSource source;
  CheckpointStep step{};      ///< for kCheckpoint
  bool weights_only = false;  ///< of the step; the training begins at iteration 0
  bool initialises = false;   ///< the initial values of the layers are used
};

/// Finds --load, else --pretrained-checkpoint, else --hf-model. Collective.
Start find_start(const RunPlan& plan, const ProcessGroupPtr& group, const DiagnosticSink& sink);

struct BuiltModel {
  std::shared_ptr<MultiModalModule> model;
  std::unique_ptr<InitTape> tape;
};

/// Creates a model of models/ or of --model-plugin; its parameters have values if `initialises`.
BuiltModel build_model(const RunPlan& plan, bool initialises);
/// Freezes parameters: the model's own choice, --freeze-module-prefix and --freeze-modules. Call it before sharding.
void freeze_model(const Arguments& arguments, const BuiltModel& built, const DiagnosticSink& sink);
/// Loads Hugging Face weights, with --downcast-to-bf16. Collective.
void load_first_weights(const Arguments& arguments, const BuiltModel& built, const ProcessGroupPtr& group,
                        const DiagnosticSink& sink);
/// Sets up recompute, shards the model, and returns its compute dtype. Collective.
at::ScalarType shard_model(const RunPlan& plan, const BuiltModel& built, const ParallelGroups& groups, bool initialises,
                           const DiagnosticSink& sink);

/// A sharded model on this rank's device, with the groups of its ranks.
struct Session {
  ParallelGroups groups;
  c10::Device device;
  Start from;
  BuiltModel built;
  at::ScalarType computed_in;  ///< dtype of matrix products

  MultiModalModule& model() const { return *built.model; }
};

/// Calls between the steps; null: nothing.
struct SessionHooks {
  std::function<void()> generators_seeded{};
  std::function<void(const MultiModalModule& model)> model_built{};  ///< its parameters are whole
};

/// Seeds the generators, finds the weights to start from, builds the session, and loads Hugging Face weights. The
/// caller loads a checkpoint. `world`: from join_world. Collective.
Session open_session(const RunPlan& plan, const ProcessGroupPtr& world, const DiagnosticSink& sink,
                     const SessionHooks& hooks = {});

/// The model of --ref-model, with the network of the trained one, sharded over the same ranks; nullopt without the
/// flag. Collective.
std::optional<Session> open_reference(const RunPlan& plan, const ParallelGroups& groups, const DiagnosticSink& sink);

/// Builds, freezes and shards the model, and loads no weights. Collective.
Session build_session(const RunPlan& plan, const ParallelGroups& groups, const Start& from, const DiagnosticSink& sink,
                      const SessionHooks& hooks = {});

}  // namespace megashard
