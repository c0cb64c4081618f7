#include "framework/objectives/objectives.h"

#include <utility>

namespace megashard {
namespace {

/// Made at the first call, which may come before other static objects exist.
std::vector<ObjectiveKind>& registered() {
  static std::vector<ObjectiveKind> kinds;
  return kinds;
}

}  // namespace

const std::vector<ObjectiveKind>& objectives() { return registered(); }

std::unique_ptr<Objective> make_objective(const std::string& name, const std::map<std::string, double>& options) {
  return make_of_kind(objectives(), "objective", name, options);
}

RegisterObjective::RegisterObjective(ObjectiveKind kind) { add_kind(registered(), std::move(kind)); }

}  // namespace megashard
