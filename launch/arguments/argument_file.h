#pragma once

#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/arguments/key_log.h"
#include "framework/mistakes.h"

namespace megashard {

/// Reads the options of a YAML file: `snake_case_flag: value` lines at the top level or under `gpt_args:`, as in
/// MindSpeed-MM's samples, and `lora_args:` beside it. Adds wrong keys and values to `mistakes`, with file and line.
/// Throws UsageError for a file that cannot be read or has no such lines.
void read_argument_file(const std::string& path, Arguments& arguments, Mistakes& mistakes, KeyLog* log = nullptr);
/// As read_argument_file, from the content of the file.
void parse_argument_file(const std::string& text, const std::string& path, Arguments& arguments, Mistakes& mistakes,
                         KeyLog* log = nullptr);

/// The words of a file, separated by white space, for --data-args-path. Throws UsageError if it cannot be read or is
/// empty.
std::vector<std::string> read_words(const std::string& path, const std::string& flag);

}  // namespace megashard
