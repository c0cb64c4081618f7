#pragma once

#include <exception>
#include <string>

namespace megashard {

/// Message of an exception without the stack that LibTorch's exceptions add to what().
std::string error_text(const std::exception& error);

}  // namespace megashard
