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

}  // namespace megashard
