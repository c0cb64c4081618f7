#pragma once

#include <iostream>
#include <string>

namespace megashard {

/// A line on standard output, flushed: logs are followed while a program runs.
inline void print_line(const std::string& line) { std::cout << line << std::endl; }

}  // namespace megashard
