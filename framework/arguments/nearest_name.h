#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace megashard {

/// Number of insertions, deletions, substitutions and swaps of neighbours that turn one word into the other; a larger
/// number than `most` if there are more.
int64_t edit_distance(std::string_view from, std::string_view to, int64_t most);

/// The most similar known name; nullopt if all differ by more than a third of its length and neither contains the
/// other. Never the negation (--no-x for --x). `-` and `_`, and upper and lower case, are equal.
std::optional<std::string> nearest_name(std::string_view name, const std::vector<std::string>& known);

/// "; did you mean X?" for messages; empty without a similar name.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

}  // namespace megashard
