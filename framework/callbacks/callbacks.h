#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "framework/registry.h"

namespace megashard {

class Listener;

/// A value of --callback.
using CallbackKind = NamedKind<std::shared_ptr<Listener>>;

/// Known callbacks, in the order of their names: those of the program and of loaded libraries (--callback-plugin).
const std::vector<CallbackKind>& callbacks();

/// The callbacks with these names, in this order; flags that are missing have their initial value.
std::vector<std::shared_ptr<Listener>> make_callbacks(const std::vector<std::string>& names,
                                                      const std::map<std::string, double>& options);

/// For RegisterCallback (framework/training/listener.h).
void add_callback(const CallbackKind& kind);

}  // namespace megashard
