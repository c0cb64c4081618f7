#include "launch/report/page_style.h"

#include <cstdio>

namespace megashard {

std::string html_text(const std::string& text) {
  std::string out;
  for (const char letter : text) {
    switch (letter) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += static_cast<unsigned char>(letter) < 0x20 ? '?' : letter;
    }
  }
  return out;
}

std::string place_text(double value) {
  char buffer[64];
  std::string text(buffer, static_cast<size_t>(std::snprintf(buffer, sizeof buffer, "%.2f", value)));
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text;
}

}  // namespace megashard
