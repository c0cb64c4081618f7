#include "tests/support/message_of.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace megashard::testing {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace megashard::testing
