#include "launch/checkpoints/flag_mistakes.h"

#include <iostream>

#include "framework/arguments/nearest_name.h"
#include "framework/diagnostics.h"

namespace megashard {

std::string what_is_wrong(const CLI::ParseError& error, const CLI::App& app, const std::vector<std::string>& words) {
  std::vector<std::string> known;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) known.push_back("--" + name);
  }
  for (const auto& word : words) {
    const auto flag = word.substr(0, word.find('='));
    if (!flag.starts_with("--") || flag == "--" || app.get_option_no_throw(flag) != nullptr) continue;
    return "unknown flag " + flag + did_you_mean(flag, known);
  }
  return error.what();
}

bool parse_words(CLI::App& app, int argc, char** argv, const std::string& before, const std::string& after) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return false;
  } catch (const CLI::ParseError& error) {
    throw UsageError(before + what_is_wrong(error, app, {argv + 1, argv + argc}) + after);
  }
  return true;
}

}  // namespace megashard
