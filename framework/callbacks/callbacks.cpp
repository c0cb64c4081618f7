#include "framework/callbacks/callbacks.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace megashard {
namespace {

/// Created by the first call, which may come before other static objects exist.
std::vector<CallbackKind>& registered_callbacks() {
  static std::vector<CallbackKind> kinds;
  return kinds;
}

}  // namespace

const std::vector<CallbackKind>& callbacks() { return registered_callbacks(); }

std::vector<std::shared_ptr<Listener>> make_callbacks(const std::vector<std::string>& names,
                                                      const std::map<std::string, double>& options) {
  std::vector<std::shared_ptr<Listener>> made;
  for (const std::string& name : names) {
    const auto kind = std::ranges::find(callbacks(), name, &CallbackKind::name);
    TORCH_CHECK(kind != callbacks().end(), "there is no callback \"", name, "\"");
    std::vector<double> values;
    for (const CallbackOption& option : kind->options) {
      const auto given = options.find(option.flag);
      values.push_back(given == options.end() ? option.initial : given->second);
    }
    made.push_back(kind->make(values));
  }
  return made;
}

void add_callback(const CallbackKind& kind) {
  auto& kinds = registered_callbacks();
  kinds.insert(std::ranges::lower_bound(kinds, kind.name, {}, &CallbackKind::name), kind);
}

}  // namespace megashard
