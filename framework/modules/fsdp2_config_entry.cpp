#include "framework/modules/fsdp2_config_entry.h"

namespace megashard::detail {
namespace {

constexpr const char* kDtypeNames = "fp16, bf16, fp32, fp64";

}  // namespace

void ConfigEntry::fail(const std::string& expected) const {
  std::string shown = value.IsScalar() ? "\"" + value.Scalar() + "\"" : value.IsSequence() ? "a list" : "a map";
  throw UsageError(source + ":" + std::to_string(value.Mark().line + 1) + ": " + key + " takes " + expected + ", got " +
                   shown + ".");
}

bool ConfigEntry::boolean() const {
  bool result = false;
  if (!value.IsScalar() || !YAML::convert<bool>::decode(value, result)) fail("true or false");
  return result;
}

int ConfigEntry::integer(int smallest) const {
  int result = 0;
  const std::string expected = "a whole number of at least " + std::to_string(smallest);
  if (!value.IsScalar() || !YAML::convert<int>::decode(value, result) || result < smallest) fail(expected);
  return result;
}

at::ScalarType ConfigEntry::dtype() const {
  if (!value.IsScalar()) fail(std::string("one of ") + kDtypeNames);
  const auto dtype = dtype_from_name(value.Scalar());
  if (!dtype || !at::isFloatingType(*dtype)) {
    throw UsageError(source + ":" + std::to_string(value.Mark().line + 1) + ": Unsupported dtype \"" + value.Scalar() +
                     "\" for " + key + "; use one of " + kDtypeNames + ".");
  }
  return *dtype;
}

std::vector<std::string> ConfigEntry::words(const char* expected) const {
  if (!value.IsSequence()) fail(expected);
  std::vector<std::string> list;
  for (const auto& item : value) {
    if (!item.IsScalar()) fail(expected);
    list.push_back(item.Scalar());
  }
  return list;
}

std::vector<std::string> ConfigEntry::patterns() const {
  return words("a list of module paths, one a line as in `- model.layers.{*}`");
}

std::optional<int> ConfigEntry::sharding_size() const {
  if (value.IsScalar() && value.Scalar() == "auto") return std::nullopt;
  int ranks = 0;
  if (!value.IsScalar() || !YAML::convert<int>::decode(value, ranks) || ranks < 1) {
    fail("\"auto\", a number of ranks, or null");
  }
  return ranks;
}

ReshardAfterForward ConfigEntry::reshard() const {
  int ranks = 0;
  if (value.IsScalar() && YAML::convert<int>::decode(value, ranks)) {
    if (ranks < 1) fail("true, false or a number of ranks");
    return ReshardAfterForward::to(ranks);
  }
  bool always = true;
  if (!value.IsScalar() || !YAML::convert<bool>::decode(value, always)) fail("true, false or a number of ranks");
  return always;
}

}  // namespace megashard::detail
