#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace megashard {

/// Columns of the programs' help.
inline constexpr size_t kHelpWidth = 80;

/// Words, and choices between |, in lines of at most kHelpWidth columns: the first line begins behind `first` columns,
/// the others behind an indent.
inline std::string wrapped_text(const std::string& text, size_t first, size_t indent) {
  std::vector<std::string> pieces(1);  // behind each a line may end
  for (const char c : text) {
    pieces.back() += c;
    if (c == ' ' || c == '|') pieces.emplace_back();
  }
  std::string lines;
  size_t column = first;
  for (const auto& piece : pieces) {
    const size_t shown = piece.ends_with(' ') ? piece.size() - 1 : piece.size();
    if (column > indent && column + shown > kHelpWidth) {
      if (lines.ends_with(' ')) lines.pop_back();
      lines += "\n" + std::string(indent, ' ');
      column = indent;
    }
    lines += piece;
    column += piece.size();
  }
  return lines;
}

/// A paragraph of such lines, all of them with the indent.
inline std::string help_lines(const std::string& text, size_t indent) {
  return std::string(indent, ' ') + wrapped_text(text, indent, indent) + "\n";
}

}  // namespace megashard
