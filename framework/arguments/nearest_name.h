#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace megashard {

/// Insertions, deletions, substitutions and swaps of neighbours that turn one word into the other;
/// any larger number when there are more than `most`.
int64_t edit_distance(std::string_view from, std::string_view to, int64_t most);

/// The known name that a misspelt one most likely means; none when all are too far (more than a
/// third of its length, and neither a part of the other). Never the opposite: --no-x for --x. `-`
/// and `_` count as equal, and so do capitals.
std::optional<std::string> nearest_name(std::string_view name, const std::vector<std::string>& known);

/// "; did you mean X?" for messages, or an empty text.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

}  // namespace megashard
