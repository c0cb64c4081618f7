#include "launch/roll/roll_value.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "framework/arguments/argument_table.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

constexpr int kDeepest = 8;  // of names that stand for names

/// The node that "a.b" names; undefined: none.
YAML::Node node_named(const YAML::Node& map, const std::string& name) {
  if (!map.IsMap()) return YAML::Node(YAML::NodeType::Undefined);
  const auto dot = name.find('.');
  const YAML::Node inside = map[name.substr(0, dot)];
  return dot == name.npos || !inside.IsDefined() ? inside : node_named(inside, name.substr(dot + 1));
}

std::string resolved(const RollValue& value, std::string text, int depth) {
  for (auto begin = text.find("${"); begin != text.npos; begin = text.find("${", begin)) {
    const auto end = text.find('}', begin);
    const auto name = text.substr(begin + 2, end == text.npos ? end : end - begin - 2);
    const YAML::Node named = end == text.npos ? YAML::Node(YAML::NodeType::Undefined) : node_named(value.root, name);
    if (!named.IsDefined() || !named.IsScalar() || depth == 0) {
      value.fail("takes a value, but ${" + name + "} is no plain value of this file; write the value itself");
    }
    const auto inside = resolved(value, named.Scalar(), depth - 1);
    text.replace(begin, end - begin + 1, inside);
    begin += inside.size();
  }
  return text;
}

template <class T>
std::optional<T> number_in(const std::string& text) {
  T number{};
  const auto* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number);
  return result.ec == std::errc() && result.ptr == end ? std::optional(number) : std::nullopt;
}

}  // namespace

void RollValue::fail(const std::string& sentence) const {
  throw UsageError(file + ":" + std::to_string(node.Mark().line + 1) + ": " + path + " " + sentence + ".");
}

void RollValue::expected(const std::string& what) const {
  const std::string got = node.IsScalar()     ? "\"" + text() + "\""
                          : node.IsSequence() ? "a list"
                          : node.IsMap()      ? "a map"
                                              : "nothing";
  fail("takes " + what + ", got " + got);
}

std::string RollValue::text() const {
  if (!node.IsScalar()) expected("a value");
  return resolved(*this, node.Scalar(), kDeepest);
}

int64_t RollValue::integer(int64_t smallest) const {
  const auto number = node.IsScalar() ? number_in<int64_t>(text()) : std::nullopt;
  if (!number || *number < smallest) expected("a whole number of at least " + std::to_string(smallest));
  return *number;
}

double RollValue::number() const {
  const auto number = node.IsScalar() ? number_in<double>(text()) : std::nullopt;
  if (!number) expected("a number");
  return *number;
}

bool RollValue::boolean() const {
  bool on = false;
  if (!node.IsScalar() || !YAML::convert<bool>::decode(YAML::Node(text()), on)) expected("true or false");
  return on;
}

std::vector<std::string> RollValue::words() const {
  if (node.IsScalar()) return {text()};
  if (!node.IsSequence()) expected("a name or a list of names");
  std::vector<std::string> list;
  for (const auto& item : node) {
    if (!item.IsScalar()) expected("a name or a list of names");
    list.push_back(resolved(*this, item.Scalar(), kDeepest));
  }
  return list;
}

at::ScalarType RollValue::dtype() const {
  static const std::map<std::string, at::ScalarType> names = {{"bf16", at::kBFloat16}, {"bfloat16", at::kBFloat16},
                                                              {"fp32", at::kFloat},    {"float32", at::kFloat},
                                                              {"fp16", at::kHalf},     {"float16", at::kHalf}};
  const auto found = node.IsScalar() ? names.find(text()) : names.end();
  if (found == names.end()) expected("bf16, float32 or fp16");
  return found->second;
}

void RollValue::store(Arguments& arguments, const std::string& flag) const {
  try {
    set_option(*find_option(flag), {text()}, arguments);
  } catch (const UsageError& error) {
    throw UsageError(file + ":" + std::to_string(node.Mark().line + 1) + ": " + path + ": " + error.what());
  }
}

}  // namespace megashard
