#include "launch/train/session.h"

#include <utility>

namespace megashard {

Session open_session(const RunPlan& plan, const ProcessGroupPtr& world, const DiagnosticSink& sink,
                     const SessionHooks& hooks) {
  const Arguments& arguments = plan.arguments;
  const ParallelGroups groups(arguments, world);
  seed_generators(arguments, world->rank(), device_of(world));
  if (hooks.generators_seeded) hooks.generators_seeded();
  const Start from = find_start(plan, world, sink);
  Session session = build_session(plan, groups, from, sink, hooks);
  if (from.source == WeightSource::kHuggingFace || arguments.lora_r)
    load_first_weights(arguments, session.built, world, sink);
  return session;
}

Session build_session(const RunPlan& plan, const ParallelGroups& groups, const Start& from, const DiagnosticSink& sink,
                      const SessionHooks& hooks) {
  BuiltModel built = build_model(plan, from.initialises);
  freeze_model(plan.arguments, built, sink);
  if (hooks.model_built) hooks.model_built(*built.model);
  const at::ScalarType computed_in = shard_model(plan, built, groups, from.initialises, sink);
  return {groups, device_of(groups.world), from, std::move(built), computed_in};
}

}  // namespace megashard
