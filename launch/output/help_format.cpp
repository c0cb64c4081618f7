#include "launch/output/help_format.h"

#include "framework/arguments/argument_help.h"

namespace megashard {

std::string HelpFormat::make_option(const CLI::Option* option, bool is_positional) const {
  std::string usage = make_option_name(option, is_positional), text = option->get_description();
  if (option->get_type_size() != 0) {
    const std::string kind = option->get_type_name();  // with constraints on the value after a colon
    if (!is_positional && !kind.empty()) usage += " " + kind.substr(0, kind.find(':'));
    if (option->get_expected_max() == CLI::detail::expected_max_vector_size) usage += " ...";
    if (!option->get_default_str().empty()) text += " [" + option->get_default_str() + "]";
    if (option->get_required()) text += "; required";
  }
  return "  " + usage + "\n" + help_lines(text, 6);
}

}  // namespace megashard
