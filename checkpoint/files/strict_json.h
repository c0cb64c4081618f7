#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace megashard {

/// The text as JSON. Throws a message that begins with `where` for what is none, for an object
/// with one key twice (readers differ in which they take, so that two tools would see two files),
/// and for nesting deeper than 32.
nlohmann::json parse_strict_json(std::string_view text, const std::string& where);
/// The same, with the keys in the text's order.
nlohmann::ordered_json parse_ordered_json(std::string_view text, const std::string& where);

/// What a file that says how something is set up has at most: config.json, metadata.json.
inline constexpr int64_t kMaxConfigBytes = 16 << 20;

}  // namespace megashard
