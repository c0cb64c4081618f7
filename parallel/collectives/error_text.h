#pragma once

#include <exception>
#include <string>

namespace megashard {

/// What an exception says, without the stack that LibTorch's own add to what().
std::string error_text(const std::exception& error);

}  // namespace megashard
