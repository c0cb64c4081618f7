#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace megashard {

/// Parses JSON. Throws an error that begins with `where` for invalid JSON, for duplicate keys in an object (readers
/// differ in which one they take), and for nesting deeper than 32.
nlohmann::json parse_strict_json(std::string_view text, const std::string& where);
/// As parse_strict_json; keeps the order of the keys.
nlohmann::ordered_json parse_ordered_json(std::string_view text, const std::string& where);

/// Maximum size of a configuration file, such as config.json or metadata.json.
inline constexpr int64_t kMaxConfigBytes = 16 << 20;

}  // namespace megashard
