#pragma once

#include <string>

namespace megashard {

/// What standard output can show. A file or a pipe shows lines alone.
struct Terminal {
  bool is_there = false;    ///< one that can rewrite a line: not TERM=dumb
  bool has_colors = false;  ///< without NO_COLOR in the environment
  int columns = 80;
};

/// Of this process, now: windows change their sizes.
Terminal standard_output();

/// Writes the line at the bottom of a terminal again, or with no text erases it. The cursor stays at its begin, so that
/// what else is printed, by other ranks too, overwrites it.
void rewrite_line(const std::string& text);

}  // namespace megashard
