#include "framework/callbacks/callbacks.h"

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
  for (const std::string& name : names) made.push_back(make_of_kind(callbacks(), "callback", name, options));
  return made;
}

void add_callback(const CallbackKind& kind) { add_kind(registered_callbacks(), kind); }

}  // namespace megashard
