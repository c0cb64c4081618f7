#include "framework/modules/fsdp2_config_entries.h"

#include <algorithm>
#include <cctype>
#include <initializer_list>
#include <limits>
#include <utility>

#include "framework/arguments/argument_value.h"

namespace megashard::detail {
namespace {

std::optional<int> ranks_in(const YamlValue& value, const char* expected) {
  const auto ranks = value.node.IsScalar() ? parse_integer(value.text()) : std::nullopt;
  if (!ranks) return std::nullopt;
  if (*ranks < 1 || *ranks > std::numeric_limits<int>::max()) value.expected(expected);
  return static_cast<int>(*ranks);
}

/// Parses one of these words, case-insensitively.
template <class T>
T choice(const YamlValue& value, std::initializer_list<std::pair<const char*, T>> choices) {
  std::string given = value.node.IsScalar() ? value.text() : "";
  std::ranges::transform(given, given.begin(), [](unsigned char letter) { return std::tolower(letter); });
  std::vector<std::string> words;
  for (const auto& [word, meaning] : choices) {
    if (given == word) return meaning;
    words.emplace_back(word);
  }
  value.expected_one_of(words);
}

}  // namespace

int read_int(const YamlValue& value, int smallest) {
  const int64_t number = value.integer(smallest);
  if (number > std::numeric_limits<int>::max()) value.expected("a smaller number");
  return static_cast<int>(number);
}

std::vector<std::string> read_patterns(const YamlValue& value) {
  return value.list("a list of module paths, one a line as in `- model.layers.{*}`");
}

std::optional<int> read_sharding_size(const YamlValue& value) {
  constexpr const char* kExpected = "\"auto\", a number of ranks, or null";
  if (value.node.IsScalar() && value.text() == "auto") return std::nullopt;
  const auto ranks = ranks_in(value, kExpected);
  if (!ranks) value.expected(kExpected);
  return ranks;
}

ReshardAfterForward read_reshard(const YamlValue& value) {
  constexpr const char* kExpected = "true, false or a number of ranks";
  if (const auto ranks = ranks_in(value, kExpected)) return ReshardAfterForward::to(*ranks);
  bool always = true;
  if (!value.node.IsScalar() || !YAML::convert<bool>::decode(value.node, always)) value.expected(kExpected);
  return always;
}

ShardDimRule read_shard_placement(const YamlValue& value) {
  constexpr const char* kExpected =
      "\"auto\", or dimensions by patterns of modules as in `model.layers.{*}.mlp.down_proj: 1`";
  ShardDimRule rule;
  if (value.node.IsScalar() && value.text() == "auto") {
    rule.divisible = true;
    return rule;
  }
  if (!value.node.IsMap()) value.expected(kExpected);
  for (const auto& item : value.node) {
    const auto dim = item.second.IsScalar() ? parse_integer(item.second.Scalar()) : std::nullopt;
    if (!item.first.IsScalar() || !dim) value.expected(kExpected);
    rule.dims.emplace_back(item.first.Scalar(), *dim);
  }
  return rule;
}

UnusedParameters read_unused_parameters(const YamlValue& value) {
  return choice<UnusedParameters>(value,
                                  {{"zero_fill", UnusedParameters::kZeroFill}, {"error", UnusedParameters::kError}});
}

std::optional<Float8Scale> read_fp8_scale(const YamlValue& value) {
  return choice<std::optional<Float8Scale>>(value, {{"false", std::nullopt},
                                                    {"true", Float8Scale::kAmax},
                                                    {"amax", Float8Scale::kAmax},
                                                    {"power_of_two", Float8Scale::kPowerOfTwo},
                                                    {"rowwise", Float8Scale::kRowAmax}});
}

GroupMemory read_memory(const YamlValue& value) {
  return choice<GroupMemory>(value, {{"registered", GroupMemory::kRegistered}, {"symmetric", GroupMemory::kSymmetric}});
}

}  // namespace megashard::detail
