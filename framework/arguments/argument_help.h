#pragma once

#include <functional>
#include <string>
#include <vector>

namespace megashard {

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
