#include "launch/output/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string_view>

namespace megashard {

Terminal standard_output() {
  Terminal terminal;
  const char* kind = std::getenv("TERM");
  terminal.is_there = isatty(STDOUT_FILENO) != 0 && kind != nullptr && std::string_view(kind) != "dumb";
  const char* plain = std::getenv("NO_COLOR");  // no-color.org: set and not empty
  terminal.has_colors = terminal.is_there && (plain == nullptr || *plain == '\0');
  winsize size{};
  if (terminal.is_there && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    terminal.columns = size.ws_col;
  return terminal;
}

void rewrite_line(const std::string& text) { std::cout << "\r\033[K" << text << '\r' << std::flush; }

}  // namespace megashard
