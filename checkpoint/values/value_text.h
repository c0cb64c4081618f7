#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "checkpoint/values/value.h"

namespace megashard {

/// Text from a file, fit for a terminal: control characters as \xNN.
std::string printable(const std::string& text);

/// The value on one line, close to Python's repr and cut with "..." behind `max_characters`.
/// numpy arrays and tensors are shown by dtype and sizes, other objects by class and fields.
std::string value_text(const Value& value, size_t max_characters = 100);

/// The same whole, as JSON: objects as {"class": name, ...}, bytes in hexadecimal.
nlohmann::json value_json(const Value& value);

}  // namespace megashard
