#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace megashard {

/// The sentence of the c10::Error that `action` throws; empty when it throws none.
template <class Action>
std::string refusal_of(const Action& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace megashard
