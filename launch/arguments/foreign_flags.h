#pragma once

#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// The equivalent of a flag or key of Accelerate, transformers' TrainingArguments or torchrun, or the reason why there
/// is none: "here it is --lr". docs/from_accelerate.md lists the same names.
struct NameHere {
  std::string text;
  std::vector<std::string> flags;  ///< flags named in the text
};

/// Accepts spellings with - or _. Nullopt if no such program has the flag.
std::optional<NameHere> name_here(const std::string& spelling);

}  // namespace megashard
