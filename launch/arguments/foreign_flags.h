#pragma once

#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// What a flag or key of Accelerate, transformers' TrainingArguments or torchrun is called here, or why there is none:
/// "here it is --lr". docs/from_accelerate.md has the same names in its tables.
struct NameHere {
  std::string text;
  std::vector<std::string> flags;  ///< that the text names
};

/// Of a spelling with - or _. None: nobody calls a flag so.
std::optional<NameHere> name_here(const std::string& spelling);

}  // namespace megashard
