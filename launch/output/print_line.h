#pragma once

#include <iostream>
#include <string>

namespace megashard {

/// Prints a line on standard output and flushes it, because logs are followed while a program runs.
inline void print_line(const std::string& line) { std::cout << line << std::endl; }

}  // namespace megashard
