#pragma once

#include <functional>
#include <string>
#include <vector>

namespace megashard {

struct Option;

/// The groups of flags that have an effect, in the order of the help: "network size".
std::vector<std::string> option_groups();
/// The part of options_help() that is about one.
std::string group_help(const std::string& group, const std::function<bool(const Option&)>& shown);
/// The part that is about one flag, "--lr"; or about those that have each of the words in their name or explanation.
/// Empty: there is none.
std::string flag_help(const Option& option);
std::string search_help(const std::vector<std::string>& words, const std::function<bool(const Option&)>& shown);
/// Whether a flag with that explanation has each of the words: in its name, or as a word of the explanation.
bool has_words(const std::string& flag, const std::string& help, const std::vector<std::string>& words);

}  // namespace megashard
