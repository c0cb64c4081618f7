#pragma once

#include <functional>
#include <string>

namespace megashard::testing {

/// The message of the exception that `call` throws, without a stack. Fails the test if it throws nothing.
std::string message_of(const std::function<void()>& call);

}  // namespace megashard::testing
