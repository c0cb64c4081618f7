#include "parallel/collectives/error_text.h"

#include <c10/util/Exception.h>

namespace megashard {

std::string error_text(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  return from_torch == nullptr ? error.what() : from_torch->what_without_backtrace();
}

}  // namespace megashard
