#include "framework/modules/unit_plan_file.h"

#include <fstream>
#include <sstream>

#include "framework/arguments/yaml_value.h"
#include "framework/diagnostics.h"
#include "framework/mistakes.h"
#include "framework/modules/fsdp2_config_entries.h"

namespace megashard {
namespace {

constexpr const char* kUnits = "units";
constexpr const char* kForward = "num_to_forward_prefetch";
constexpr const char* kBackward = "num_to_backward_prefetch";

std::vector<UnitPlan::Unit> read_units(const YamlValue& value) {
  if (!value.node.IsSequence()) value.expected("a list of module paths, or of lists of them");
  std::vector<UnitPlan::Unit> units;
  for (const auto& entry : value.node) {
    units.push_back(YamlValue{value.source, value.key, entry, value.names}.words());
  }
  return units;
}

}  // namespace

UnitPlan parse_unit_plan(const std::string& text, const std::string& source) {
  const YAML::Node root = load_yaml(text, source);
  if (!root.IsMap()) throw UsageError(source + ": a plan of units holds `units:` and a list; see docs/unit_plans.md.");
  UnitPlan plan;
  Mistakes mistakes;
  for (const auto& item : root) {
    const YamlValue entry{source, item.first.Scalar(), item.second};
    mistakes.attempt([&] {
      if (entry.key == kUnits) {
        plan.units = read_units(entry);
      } else if (entry.key == kForward) {
        plan.forward_prefetch = detail::read_int(entry, 0);
      } else if (entry.key == kBackward) {
        plan.backward_prefetch = detail::read_int(entry, 0);
      } else {
        throw UsageError(unknown_key(yaml_place(source, item.first), entry.key, {kUnits, kForward, kBackward}));
      }
    });
  }
  mistakes.throw_if_any();
  return plan;
}

UnitPlan load_unit_plan(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw UsageError("--fsdp2-plan " + path + ": the file cannot be read; give one, or auto or off.");
  return parse_unit_plan(text.str(), path);
}

std::string unit_plan_text(const UnitPlan& plan) {
  std::ostringstream text;
  text << "units:\n";
  for (const auto& unit : plan.units) {
    text << "  - ";
    if (unit.size() > 1) text << "[";
    for (size_t i = 0; i < unit.size(); ++i) text << (i == 0 ? "" : ", ") << unit[i];
    text << (unit.size() > 1 ? "]\n" : "\n");
  }
  text << kForward << ": " << plan.forward_prefetch << "\n" << kBackward << ": " << plan.backward_prefetch << "\n";
  return text.str();
}

}  // namespace megashard
