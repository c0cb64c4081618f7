#pragma once

#include <iostream>
#include <string>

namespace megashard {

/// Capabilities of standard output. Files and pipes support only lines.
struct Terminal {
  bool is_there = false;    ///< can rewrite a line: not TERM=dumb
  bool has_colors = false;  ///< NO_COLOR is not in the environment
  int columns = 80;
};

/// Queries this process's terminal; its size may change.
Terminal standard_output();

/// Rewrites the bottom line of a terminal; an empty text erases it. The cursor stays at its beginning, so that other
/// output, also of other ranks, overwrites it.
void rewrite_line(const std::string& text);

/// Prints a line on standard output and flushes it, because logs are followed while a program runs.
inline void print_line(const std::string& line) { std::cout << line << std::endl; }

}  // namespace megashard
