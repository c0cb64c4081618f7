#include "framework/modules/freeze.h"

#include <algorithm>
#include <set>

#include "framework/arguments/nearest_name.h"
#include "framework/diagnostics.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/module_patterns.h"

namespace megashard {
namespace {

/// "a.b.weight" -> a, a.b, a.b.weight
void add_prefixes(const std::string& name, std::set<std::string>& prefixes) {
  for (auto dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) prefixes.insert(name.substr(0, dot));
  prefixes.insert(name);
}

/// Freezes a parameter and returns its number of elements.
int64_t freeze(at::Tensor parameter) {
  if (!parameter.requires_grad()) return 0;
  parameter.set_requires_grad(false);
  return parameter.numel();
}

void require_something_to_train(const torch::nn::Module& model, const std::string& key) {
  const auto left = model.parameters();
  require(std::any_of(left.begin(), left.end(), [](const auto& each) { return each.requires_grad(); }),
          key + " freezes every parameter; leave some to train.");
}

}  // namespace

int64_t freeze_parameters(torch::nn::Module& model, const std::vector<std::string>& prefixes) {
  if (prefixes.empty()) return 0;
  std::set<std::string> unmatched(prefixes.begin(), prefixes.end()), known;
  int64_t elements = 0;
  for (auto& item : model.named_parameters()) {
    add_prefixes(item.key(), known);
    bool frozen = false;
    for (const auto& prefix : prefixes) {
      if (!item.key().starts_with(prefix)) continue;
      unmatched.erase(prefix);
      frozen = true;
    }
    if (frozen) elements += freeze(item.value());
  }
  if (!unmatched.empty()) {
    const std::string& wrong = *unmatched.begin();
    const auto hint = did_you_mean(wrong, {known.begin(), known.end()});
    throw UsageError("freeze_module_prefix: no parameter's name begins with \"" + wrong + "\"" +
                     (hint.empty() ? "; write for example model.embed_tokens." : hint));
  }
  require_something_to_train(model, "freeze_module_prefix");
  return elements;
}

int64_t freeze_modules(torch::nn::Module& model, std::vector<std::string> patterns) {
  if (patterns.empty()) return 0;
  const auto* mixin = dynamic_cast<const FSDP2Mixin*>(&model);
  const auto paths = mixin == nullptr ? OtherPaths() : mixin->other_paths();
  for (auto& pattern : patterns) pattern = pattern_here(model, paths, pattern);
  std::set<std::string> unmatched(patterns.begin(), patterns.end()), known;
  int64_t elements = 0;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    known.insert(item.key());
    for (const auto& pattern : patterns) {
      if (!matches_native_pattern(pattern, item.key())) continue;
      unmatched.erase(pattern);
      for (const auto& parameter : item.value()->parameters()) elements += freeze(parameter);
    }
  }
  if (!unmatched.empty()) {
    const auto hint = did_you_mean(*unmatched.begin(), {known.begin(), known.end()});
    throw UsageError("freeze_modules: no module's path matches \"" + *unmatched.begin() + "\"" +
                     (hint.empty() ? "; write for example model.layers.{0-3}." : hint));
  }
  require_something_to_train(model, "freeze_modules");
  return elements;
}

}  // namespace megashard
