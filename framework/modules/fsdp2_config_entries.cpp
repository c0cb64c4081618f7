#include "framework/modules/fsdp2_config_entries.h"

#include <limits>

#include "framework/arguments/typed_text.h"

namespace megashard::detail {
namespace {

std::optional<int> ranks_in(const YamlValue& value, const char* expected) {
  const auto ranks = value.node.IsScalar() ? parse_integer(value.text()) : std::nullopt;
  if (!ranks) return std::nullopt;
  if (*ranks < 1 || *ranks > std::numeric_limits<int>::max()) value.expected(expected);
  return static_cast<int>(*ranks);
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

}  // namespace megashard::detail
