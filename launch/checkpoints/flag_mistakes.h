#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace megashard {

/// What CLI11 found wrong with the words, or, where one of them is no flag of `app`, that word and
/// the flag it may mean: CLI11 would tell of the flags first that are missing in its place.
std::string what_is_wrong(const CLI::ParseError& error, const CLI::App& app, const std::vector<std::string>& words);

/// Parses the words behind the subcommand, argv[0]. False: they ask for help, which is printed. Throws UsageError:
/// what is wrong between `before` and `after`.
bool parse_words(CLI::App& app, int argc, char** argv, const std::string& before, const std::string& after);

}  // namespace megashard
