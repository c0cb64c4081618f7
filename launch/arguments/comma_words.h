#pragma once

#include <string>
#include <vector>

namespace megashard {

/// The names between commas, of all words: {"a, b", "c"} -> a b c. Spaces around a name and empty
/// names are dropped.
std::vector<std::string> comma_words(const std::vector<std::string>& words);

}  // namespace megashard
