#include "framework/objectives/objectives.h"

#include <c10/util/Exception.h>

#include <algorithm>
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
  const auto& kinds = objectives();
  const auto kind = std::ranges::find(kinds, name, &ObjectiveKind::name);
  TORCH_CHECK(kind != kinds.end(), "there is no objective \"", name, "\"");
  std::vector<double> values;
  for (const ObjectiveOption& option : kind->options) {
    const auto given = options.find(option.flag);
    values.push_back(given == options.end() ? option.initial : given->second);
  }
  return kind->make(values);
}

RegisterObjective::RegisterObjective(ObjectiveKind kind) {
  auto& kinds = registered();
  kinds.insert(std::ranges::lower_bound(kinds, kind.name, {}, &ObjectiveKind::name), std::move(kind));
}

}  // namespace megashard
