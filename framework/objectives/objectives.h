#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "framework/objectives/objective.h"

namespace megashard {

/// A number that an objective takes by a flag of its own.
struct ObjectiveOption {
  std::string flag;  ///< "--dpo-beta"
  double initial = 0, least = 0, most = 0;
  std::string help;
};

/// A value of --objective.
struct ObjectiveKind {
  std::string name;
  std::vector<ObjectiveOption> options{};
  /// `options`: their values, in the order of the list above.
  std::function<std::unique_ptr<Objective>(const std::vector<double>& options)> make;
};

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
