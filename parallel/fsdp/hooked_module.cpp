#include "parallel/fsdp/hooked_module.h"

#include <cxxabi.h>

#include <cstdlib>

namespace megashard {

void HookedModule::before_conversion() const {
  if (hooks_) hooks_->before_conversion();
}

void HookedModule::before_rebind(const char* operation) const {
  if (hooks_) hooks_->before_rebind(operation);
}

namespace detail {

std::string demangled_class_name(const char* type_name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(type_name, nullptr, nullptr, &status),
                                                         &std::free);
  std::string name = status == 0 ? text.get() : type_name;
  name = name.substr(0, name.find('<'));
  if (const auto colon = name.rfind("::"); colon != std::string::npos) name = name.substr(colon + 2);
  if (name.size() > 4 && name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

}  // namespace detail
}  // namespace megashard
