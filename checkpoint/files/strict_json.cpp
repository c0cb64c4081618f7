#include "checkpoint/files/strict_json.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

namespace megashard {
namespace {

template <class Json>
Json parse_checked(std::string_view text, const std::string& where) {
  using Event = typename Json::parse_event_t;
  constexpr int kMaxDepth = 32;
  std::vector<std::unordered_set<std::string>> keys;  // keys of each open object
  std::string twice;
  bool too_deep = false;
  const auto check_event = [&](int depth, Event event, const Json& parsed) {
    too_deep = too_deep || depth > kMaxDepth;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && twice.empty()) {
      const auto& key = parsed.template get_ref<const std::string&>();
      if (!keys.back().insert(key).second) twice = key;
    }
    return !too_deep;
  };
  auto root = Json::parse(text, check_event, /*allow_exceptions=*/false);
  TORCH_CHECK(!too_deep, where, " is nested deeper than ", kMaxDepth);
  TORCH_CHECK(twice.empty(), where, " has the key \"", twice, "\" twice");
  TORCH_CHECK(!root.is_discarded(), where, " is no JSON, or was cut short");
  return root;
}

}  // namespace

nlohmann::json parse_strict_json(std::string_view text, const std::string& where) {
  return parse_checked<nlohmann::json>(text, where);
}

nlohmann::ordered_json parse_ordered_json(std::string_view text, const std::string& where) {
  return parse_checked<nlohmann::ordered_json>(text, where);
}

}  // namespace megashard
