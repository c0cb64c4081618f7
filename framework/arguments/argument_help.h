#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace megashard {

/// Columns of the help.
inline constexpr size_t kHelpWidth = 80;

/// Wraps words, and choices between |, at kHelpWidth columns. The first line starts at column `first`, the others are
/// indented.
inline std::string wrapped_text(const std::string& text, size_t first, size_t indent) {
  std::vector<std::string> pieces(1);  // lines may break after each piece
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

/// A wrapped paragraph with all lines indented.
inline std::string help_lines(const std::string& text, size_t indent) {
  return std::string(indent, ' ') + wrapped_text(text, indent, indent) + "\n";
}

struct Option;

/// Groups of flags that have an effect, in the order of the help: "network size".
std::vector<std::string> option_groups();
/// The part of options_help() for one group.
std::string group_help(const std::string& group, const std::function<bool(const Option&)>& shown);
/// Help for one flag, "--lr"; or for the flags that have each of the words in their name or explanation. Empty if there
/// are none.
std::string flag_help(const Option& option);
std::string search_help(const std::vector<std::string>& words, const std::function<bool(const Option&)>& shown);
/// True if each of the words is part of the flag's name or a word of its explanation.
bool has_words(const std::string& flag, const std::string& help, const std::vector<std::string>& words);

}  // namespace megashard
