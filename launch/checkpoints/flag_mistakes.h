#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace megashard {

/// Description of CLI11's error. If one of the words is not a flag of `app`: that word and the most similar flag,
/// because CLI11 would first report the missing flags.
std::string what_is_wrong(const CLI::ParseError& error, const CLI::App& app, const std::vector<std::string>& words);

/// Parses the words after the subcommand, argv[0]. Returns false after printing help. Throws UsageError with the error
/// between `before` and `after`.
bool parse_words(CLI::App& app, int argc, char** argv, const std::string& before, const std::string& after);

}  // namespace megashard
