#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "framework/objectives/objective.h"
#include "framework/registry.h"

namespace megashard {

/// A value of --objective.
using ObjectiveKind = NamedKind<std::unique_ptr<Objective>>;

/// All of them, in the order of their names. Each one's file adds it by a RegisterObjective.
const std::vector<ObjectiveKind>& objectives();

/// The objective of --objective NAME with the values of its flags; flags that are missing have their initial value.
std::unique_ptr<Objective> make_objective(const std::string& name, const std::map<std::string, double>& options);

/// A static object of an objective's file; makes --objective and --help know it.
struct RegisterObjective {
  explicit RegisterObjective(ObjectiveKind kind);
};

inline constexpr const char* kNextToken = "next-token";

}  // namespace megashard
