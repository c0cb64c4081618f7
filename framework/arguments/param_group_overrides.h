#pragma once

#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

/// Settings for parameters with matching names (Megatron's ParamKey and ParamGroupOverride). Unset values are
/// unchanged.
struct ParamGroupOverride {
  std::string pattern;  ///< matches the whole name, as Python's fnmatch: "*.q_proj.weight"
  bool ignores_case = false;
  std::optional<double> lr_mult{}, wd_mult{}, beta1{}, beta2{};

  bool matches(const std::string& name) const;
};

/// Parses "*.norm.weight:wd_mult=0.5,lr_mult=0.1". Throws UsageError.
ParamGroupOverride parse_param_group_override(const std::string& text);

/// Overrides from --lr-mult with --lr-scale-modules, --weight-decay-exclude-modules and --param-group-overrides. If
/// several match a parameter, the last one is used.
std::vector<ParamGroupOverride> param_group_overrides(const Arguments& arguments);

}  // namespace megashard
