#pragma once

#include <string>

namespace megashard {

/// The message for a data set's prefix without .bin and .idx: the cause and the remedy. Recognises text that was not
/// tokenised, prefixes with an extension or without _text_document, and folders.
std::string why_no_tokens(const std::string& prefix);

}  // namespace megashard
