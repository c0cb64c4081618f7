#pragma once

#include <string>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

/// Stores the options of a YAML file: `snake_case_flag: value` lines at the top or under
/// `gpt_args:`, as MindSpeed-MM's samples have them, and `lora_args:` beside it. Throws UsageError
/// naming file, line and key; an unknown key is an error.
void read_argument_file(const std::string& path, Arguments& arguments);
/// The same of that file's content.
void parse_argument_file(const std::string& text, const std::string& path, Arguments& arguments);

/// The content of a file that the command line names; `name` stands in messages: "the argument
/// file". Throws UsageError when it cannot be read.
std::string read_named_file(const std::string& path, const std::string& name);

/// The words of a file, as white space separates them, for --data-args-path. Throws UsageError when
/// it cannot be read or is empty.
std::vector<std::string> read_words(const std::string& path, const std::string& flag);

}  // namespace megashard
