#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "checkpoint/values/value.h"

namespace megashard {

/// Escapes text from a file for a terminal: control characters become \xNN.
std::string printable(const std::string& text);

/// The value on one line, similar to Python's repr, cut with "..." after `max_characters`. numpy arrays and tensors are
/// shown by dtype and sizes, other objects by class and fields.
std::string value_text(const Value& value, size_t max_characters = 100);

/// The whole value as JSON: objects as {"class": name, ...}, bytes in hexadecimal.
nlohmann::json value_json(const Value& value);

}  // namespace megashard
