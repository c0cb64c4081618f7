#include "framework/modules/freeze.h"

#include <algorithm>
#include <set>

#include "framework/arguments/nearest_name.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

/// "a.b.weight" -> a, a.b, a.b.weight
void add_prefixes(const std::string& name, std::set<std::string>& prefixes) {
  for (auto dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) prefixes.insert(name.substr(0, dot));
  prefixes.insert(name);
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
    if (!frozen) continue;
    item.value().set_requires_grad(false);
    elements += item.value().numel();
  }
  if (!unmatched.empty()) {
    const std::string& wrong = *unmatched.begin();
    const auto hint = did_you_mean(wrong, {known.begin(), known.end()});
    throw UsageError("freeze_module_prefix: no parameter's name begins with \"" + wrong + "\"" +
                     (hint.empty() ? "; write for example model.embed_tokens." : hint));
  }
  const auto left = model.parameters();
  if (std::none_of(left.begin(), left.end(), [](const auto& each) { return each.requires_grad(); }))
    throw UsageError("freeze_module_prefix freezes every parameter; leave some to train.");
  return elements;
}

}  // namespace megashard
