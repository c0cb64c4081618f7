#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace megashard {

class Listener;

/// A number that a callback takes by a flag of its own.
struct CallbackOption {
  std::string flag;  ///< "--plateau-steps"
  double initial = 0, least = 0, most = 0;
  std::string help;
};

/// A value of --callback.
struct CallbackKind {
  std::string name;
  std::vector<CallbackOption> options{};
  /// `options`: their values, in the order of the list above.
  std::function<std::shared_ptr<Listener>(const std::vector<double>& options)> make;
};

/// Known callbacks, in the order of their names: those of the program and of loaded libraries (--callback-plugin).
const std::vector<CallbackKind>& callbacks();

/// The callbacks with these names, in this order; flags that are missing have their initial value.
std::vector<std::shared_ptr<Listener>> make_callbacks(const std::vector<std::string>& names,
                                                      const std::map<std::string, double>& options);

/// For RegisterCallback (framework/training/register_callback.h).
void add_callback(const CallbackKind& kind);

}  // namespace megashard
