#include "framework/modules/wrap_policy.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <unordered_map>

#include "framework/arguments/nearest_name.h"
#include "framework/arguments/yaml_value.h"
#include "framework/diagnostics.h"
#include "framework/mistakes.h"
#include "framework/modules/fsdp2_config_entries.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {
namespace {

/// Class name for wrap policies; empty for modules without hooks.
std::string class_of(const torch::nn::Module& module) {
  const auto* hooked = dynamic_cast<const HookedModule*>(&module);
  return hooked == nullptr ? "" : hooked->class_name();
}

bool contains(const NamedModule& outer, const NamedModule& inner) { return inner.path.starts_with(outer.path + "."); }

std::vector<NamedModule> without_outer(const std::vector<NamedModule>& modules) {
  std::vector<NamedModule> inner;
  for (const auto& each : modules) {
    const bool outer =
        std::any_of(modules.begin(), modules.end(), [&](const auto& other) { return contains(each, other); });
    if (!outer) inner.push_back(each);
  }
  return inner;
}

/// Number of modules that hold each parameter.
std::map<const c10::TensorImpl*, int> count_holders(const torch::nn::Module& model) {
  std::map<const c10::TensorImpl*, int> holders;
  const auto count = [&holders](const torch::nn::Module& module) {
    for (const auto& parameter : module.parameters(/*recurse=*/false)) ++holders[parameter.unsafeGetTensorImpl()];
  };
  count(model);
  for (const auto& each : model.modules(/*include_self=*/false)) count(*each);
  return holders;
}

void tell(const std::vector<NamedModule>& modules, const DiagnosticSink& sink) {
  if (!sink || modules.empty()) return;
  std::map<std::string, PatternMatch> by_class;
  for (const auto& each : modules) {
    auto& match = by_class[class_of(*each.module)];
    match.pattern = class_of(*each.module);
    match.paths.push_back(each.path);
  }
  for (const auto& [name, match] : by_class) sink(Severity::kNotice, "FSDP2: wrap_policy: " + describe_match(match));
}

/// Role of a class in models of any family: "Qwen3MoeAttention" is an Attention. Empty if unknown.
std::string part_of(const std::string& name) {
  for (const char* part : {"DecoderLayer", "SparseMoeBlock", "Block", "Experts", "Attention", "MLP"}) {
    if (!name.ends_with(part)) continue;
    const bool sees = name.find("Vision") != name.npos;
    return (sees ? "Vision" : "") + std::string(part);
  }
  return "";
}

/// Replaces the requested classes by the model's counterparts.
std::vector<std::string> played_by(std::vector<std::string> classes, const std::set<std::string>& known,
                                   const std::string& key, const DiagnosticSink& sink) {
  for (auto& name : classes) {
    const auto part = part_of(name);
    if (known.contains(name) || part.empty()) continue;
    std::vector<std::string> players;
    std::copy_if(known.begin(), known.end(), std::back_inserter(players),
                 [&](const auto& other) { return part_of(other) == part; });
    if (players.size() != 1) continue;
    if (sink) sink(Severity::kNotice, "FSDP2: " + key + ": " + name + " is " + players.front() + " in this model");
    name = players.front();
  }
  return classes;
}

}  // namespace

bool is_output_projection(const std::string& path) {
  const auto last = path.substr(path.rfind('.') + 1);
  return last == "lm_head" || last == "output_layer";
}

std::vector<NamedModule> experts_of_policy(const torch::nn::Module& model, std::vector<std::string> classes,
                                           const DiagnosticSink& sink) {
  if (classes.empty()) return {};
  std::set<std::string> stacked;
  for (const auto& each : model.modules(/*include_self=*/false)) {
    if (const auto name = class_of(*each); part_of(name) == "Experts") stacked.insert(name);
  }
  for (auto& name : classes) {  // transformers before 5 had a module for each expert
    if (stacked.size() != 1 || !name.ends_with("MLP")) continue;
    if (sink) sink(Severity::kNotice, "FSDP2: moe_experts: " + name + " is " + *stacked.begin() + " in this model");
    name = *stacked.begin();
  }
  const auto selected = select_classes(model, classes, "moe_experts", sink);
  tell(selected, sink);
  return selected;
}

std::vector<NamedModule> select_classes(const torch::nn::Module& model, const std::vector<std::string>& asked,
                                        const std::string& key, const DiagnosticSink& sink) {
  std::set<std::string> known;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) known.insert(class_of(*item.value()));
  known.erase("");  // modules without hooks
  const auto classes = played_by(asked, known, key, sink);
  std::vector<NamedModule> selected;
  std::set<std::string> missing(classes.begin(), classes.end());
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const auto name = class_of(*item.value());
    if (std::find(classes.begin(), classes.end(), name) == classes.end()) continue;
    missing.erase(name);
    selected.push_back({item.key(), item.value().get()});
  }
  for (const auto& name : missing) {
    const auto hint = did_you_mean(name, {known.begin(), known.end()});
    if (selected.empty() || !hint.empty()) {
      throw UsageError(key + ": the model has no module of class " + name +
                       (hint.empty() ? "; its classes are " + c10::Join(", ", known) + "." : hint));
    }
    if (sink) sink(Severity::kNotice, "FSDP2: " + key + ": no module of this model plays the part of " + name);
  }
  return selected;
}

std::vector<NamedModule> modules_of_policy(const torch::nn::Module& model, const WrapPolicy& policy,
                                           const std::vector<NamedModule>& layers, const DiagnosticSink& sink) {
  auto groups = without_outer(layers);
  const auto holders = count_holders(model);
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const NamedModule each{item.key(), item.value().get()};
    const bool embedding = class_of(*each.module) == "Embedding";
    const bool output = policy.lm_output && is_output_projection(each.path);
    const bool chosen = std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
      return group.module == each.module || contains(group, each);
    });
    if (chosen || (!embedding && !output)) continue;
    const auto parameters = each.module->parameters();
    const bool tied = std::any_of(parameters.begin(), parameters.end(), [&](const auto& parameter) {
      return holders.at(parameter.unsafeGetTensorImpl()) > 1;
    });
    if (!tied) {
      groups.push_back(each);
    } else if (sink && (output || policy.embeddings)) {
      sink(Severity::kNotice,
           "FSDP2: wrap_policy: " + each.path + " stays in the root group, because its weight is tied");
    }
  }
  tell(groups, sink);
  return groups;
}

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

namespace {

bool is_inside(const std::string& path, const std::string& outer) {
  return outer.empty() || path.starts_with(outer + ".");
}

}  // namespace

void leave_out_tied(std::vector<NamedModule>& modules, const std::string& key, const DiagnosticSink& sink) {
  std::unordered_map<const c10::TensorImpl*, std::vector<const NamedModule*>> owners;
  for (const auto& each : modules) {
    for (const auto& parameter : each.module->parameters()) owners[parameter.unsafeGetTensorImpl()].push_back(&each);
  }
  std::set<std::string> tied;
  for (const auto& each : modules) {
    const auto is_shared = [&](const at::Tensor& parameter) {
      return std::ranges::any_of(owners[parameter.unsafeGetTensorImpl()], [&](const NamedModule* other) {
        return other->module != each.module && !is_inside(each.path, other->path) && !is_inside(other->path, each.path);
      });
    };
    if (std::ranges::any_of(each.module->parameters(), is_shared)) tied.insert(each.path);
  }
  if (tied.empty()) return;
  std::erase_if(modules, [&](const NamedModule& each) { return tied.contains(each.path); });
  if (sink)
    sink(Severity::kNotice, "FSDP2: " + key + ": " + c10::Join(", ", std::vector(tied.begin(), tied.end())) +
                                " have one weight, so they stay in the unit around them");
}

}  // namespace megashard
