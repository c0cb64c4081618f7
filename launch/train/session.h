#pragma once

#include <functional>

#include "launch/train/run_setup.h"

namespace megashard {

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

/// Builds, freezes and shards the model, and loads no weights. Collective.
Session build_session(const RunPlan& plan, const ParallelGroups& groups, const Start& from, const DiagnosticSink& sink,
                      const SessionHooks& hooks = {});

}  // namespace megashard
