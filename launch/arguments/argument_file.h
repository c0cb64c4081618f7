#pragma once

#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/arguments/key_log.h"
#include "framework/mistakes.h"

namespace megashard {

/// Stores the options of a YAML file: `snake_case_flag: value` lines at the top or under
/// `gpt_args:`, as MindSpeed-MM's samples have them, and `lora_args:` beside it. Wrong keys and
/// values go to `mistakes`, with file and line. Throws UsageError for a file that cannot be read or
/// holds no such lines.
void read_argument_file(const std::string& path, Arguments& arguments, Mistakes& mistakes, KeyLog* log = nullptr);
/// The same of that file's content.
void parse_argument_file(const std::string& text, const std::string& path, Arguments& arguments, Mistakes& mistakes,
                         KeyLog* log = nullptr);

/// The words of a file, as white space separates them, for --data-args-path. Throws UsageError when
/// it cannot be read or is empty.
std::vector<std::string> read_words(const std::string& path, const std::string& flag);

}  // namespace megashard
