#pragma once

#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

/// Settings of the parameters whose names match (Megatron's ParamKey and ParamGroupOverride). What is unset stays.
struct ParamGroupOverride {
  std::string pattern;  ///< of the whole name, as Python's fnmatch: "*.q_proj.weight"
  bool ignores_case = false;
  std::optional<double> lr_mult{}, wd_mult{}, beta1{}, beta2{};

  bool matches(const std::string& name) const;
};

/// "*.norm.weight:wd_mult=0.5,lr_mult=0.1". Throws UsageError with the message.
ParamGroupOverride parse_param_group_override(const std::string& text);

/// Of --lr-mult with --lr-scale-modules, --weight-decay-exclude-modules and --param-group-overrides; where several
/// match a parameter, a later one counts.
std::vector<ParamGroupOverride> param_group_overrides(const Arguments& arguments);

}  // namespace megashard
