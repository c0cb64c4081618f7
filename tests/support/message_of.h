#pragma once

#include <functional>
#include <string>

namespace megashard::testing {

/// The message of what `call` throws, without a stack; fails the test when it throws nothing.
std::string message_of(const std::function<void()>& call);

}  // namespace megashard::testing
