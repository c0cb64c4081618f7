#include "launch/checkpoints/flag_mistakes.h"

#include "framework/arguments/nearest_name.h"

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

}  // namespace megashard
