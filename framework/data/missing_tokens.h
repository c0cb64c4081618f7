#pragma once

#include <string>

namespace megashard {

/// Why a data set's prefix has no .bin and .idx, and what to give instead: one message. Knows text
/// that was not tokenised, prefixes with an extension or without _text_document, and folders.
std::string why_no_tokens(const std::string& prefix);

}  // namespace megashard
