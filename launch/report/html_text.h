#pragma once

#include <string>

namespace megashard {

/// Escapes text from a file for HTML, within tags and quoted attributes; control characters become "?".
std::string html_text(const std::string& text);

/// A coordinate in a drawing, to two decimals: "12.5".
std::string place_text(double value);

}  // namespace megashard
