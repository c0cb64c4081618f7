#include "framework/arguments/param_group_overrides.h"

#include <fnmatch.h>

#include <algorithm>

#include "framework/arguments/typed_text.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

constexpr const char* kForm = "; give PATTERN:SETTING=NUMBER,..., as in \"*.norm.weight:wd_mult=0,lr_mult=0.1\"";

/// The setting with that name; null if unknown.
std::optional<double>* find_setting(ParamGroupOverride& settings, const std::string& name) {
  if (name == "lr_mult") return &settings.lr_mult;
  if (name == "wd_mult") return &settings.wd_mult;
  if (name == "beta1") return &settings.beta1;
  if (name == "beta2") return &settings.beta2;
  return nullptr;
}

}  // namespace

bool ParamGroupOverride::matches(const std::string& name) const {
  return ::fnmatch(pattern.c_str(), name.c_str(), ignores_case ? FNM_CASEFOLD : 0) == 0;
}

ParamGroupOverride parse_param_group_override(const std::string& text) {
  const std::string which = "--param-group-overrides \"" + text + "\" ";
  const size_t colon = text.rfind(':');
  require(colon != text.npos && colon > 0, which + "names no parameters" + kForm);
  ParamGroupOverride settings{.pattern = text.substr(0, colon)};
  for (const auto& word : split_text(text.substr(colon + 1), ",")) {
    const size_t equals = std::min(word.find('='), word.size());
    auto* setting = find_setting(settings, word.substr(0, equals));
    require(setting != nullptr,
            which + "has the setting \"" + word + "\", and there are lr_mult, wd_mult, beta1 and beta2" + kForm);
    const auto value = parse_number(word.substr(std::min(equals + 1, word.size())));
    const bool is_beta = setting == &settings.beta1 || setting == &settings.beta2;
    require(value && *value >= 0 && (!is_beta || *value < 1),
            which + "has \"" + word + "\", which is no number of 0 or more" + (is_beta ? " below 1" : "") + kForm);
    *setting = value;
  }
  return settings;
}

std::vector<ParamGroupOverride> param_group_overrides(const Arguments& arguments) {
  std::vector<ParamGroupOverride> overrides;
  const auto add_part = [&](const std::string& part) -> ParamGroupOverride& {
    return overrides.emplace_back(ParamGroupOverride{.pattern = "*" + part + "*", .ignores_case = true});
  };
  for (const auto& part : arguments.lr_scale_modules) add_part(part).lr_mult = arguments.lr_mult;
  for (const auto& part : arguments.weight_decay_exclude_modules) add_part(part).wd_mult = 0;
  for (const auto& text : arguments.param_group_overrides) overrides.push_back(parse_param_group_override(text));
  return overrides;
}

}  // namespace megashard
