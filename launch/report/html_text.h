#pragma once

#include <string>

namespace megashard {

/// Text from a file, fit for HTML, within tags and in quoted attributes; control characters as "?".
std::string html_text(const std::string& text);

/// A place in a drawing, to a hundredth: "12.5".
std::string place_text(double value);

}  // namespace megashard
