#include "framework/arguments/yaml_value.h"

#include <c10/util/StringUtil.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "framework/arguments/argument_value.h"
#include "framework/arguments/nearest_name.h"
#include "framework/diagnostics.h"
#include "framework/mistakes.h"

namespace megashard {
namespace {

class DuplicateKeys {
 public:
  explicit DuplicateKeys(const std::string& source) : source_(source) {}

  void refuse(const YAML::Node& root) {
    find(root);
    mistakes_.throw_if_any();
  }

 private:
  void find(const YAML::Node& node) {
    if (!node.IsMap() && !node.IsSequence()) return;
    if (!seen_.insert(node.Mark().pos).second) return;  // an alias of a node that was checked
    if (node.IsSequence()) {
      for (const auto& item : node) find(item);
      return;
    }
    std::set<std::string> keys;
    for (const auto& item : node) {
      const auto& key = item.first;
      const bool merge = key.IsScalar() && key.Scalar() == "<<";
      if (key.IsScalar() && !merge && !keys.insert(key.Scalar()).second) {
        mistakes_.add(yaml_place(source_, key) + key.Scalar() + " is given twice; keep one.");
      }
      find(item.second);
    }
  }

  const std::string& source_;
  Mistakes mistakes_;
  std::set<int> seen_;  // positions of checked nodes
};

constexpr int kDeepest = 8;  // nesting of references

/// The node at path "a.b"; undefined if there is none.
YAML::Node node_named(const YAML::Node& map, const std::string& name) {
  if (!map.IsMap()) return YAML::Node(YAML::NodeType::Undefined);
  const auto dot = name.find('.');
  const YAML::Node inside = map[name.substr(0, dot)];
  return dot == name.npos || !inside.IsDefined() ? inside : node_named(inside, name.substr(dot + 1));
}

std::string resolved(const YamlValue& value, std::string text, int depth = kDeepest) {
  if (value.names == nullptr) return text;
  for (auto begin = text.find("${"); begin != text.npos; begin = text.find("${", begin)) {
    const auto end = text.find('}', begin);
    const auto name = text.substr(begin + 2, end == text.npos ? end : end - begin - 2);
    const YAML::Node named = end == text.npos ? YAML::Node(YAML::NodeType::Undefined) : node_named(*value.names, name);
    if (!named.IsDefined() || !named.IsScalar() || depth == 0) {
      value.fail("takes a value, but ${" + name + "} is no plain value of this file; write the value itself");
    }
    const auto inside = resolved(value, named.Scalar(), depth - 1);
    text.replace(begin, end - begin + 1, inside);
    begin += inside.size();
  }
  return text;
}

std::string found_in(const YamlValue& value) {
  if (value.node.IsScalar()) return "\"" + value.text() + "\"";
  return value.node.IsSequence() ? "a list" : value.node.IsMap() ? "a map" : "nothing";
}

}  // namespace

YAML::Node load_yaml(const std::string& text, const std::string& source) {
  YAML::Node root;
  try {
    root = YAML::Load(text);
  } catch (const YAML::ParserException& error) {
    throw UsageError(source + ":" + std::to_string(error.mark.line + 1) + ": this is not YAML: " + error.msg + ".");
  }
  DuplicateKeys(source).refuse(root);
  return root;
}

std::string yaml_place(const std::string& source, const YAML::Node& node) {
  return source + ":" + std::to_string(node.Mark().line + 1) + ": ";
}

std::string unknown_key(const std::string& place, const std::string& path, const std::vector<std::string>& known,
                        const std::string& otherwise) {
  const auto hint = did_you_mean(path.substr(path.rfind('.') + 1), known);
  return place + "unknown key \"" + path + "\"" + (hint.empty() ? otherwise : hint);
}

void YamlValue::fail(const std::string& message) const {
  throw UsageError(yaml_place(source, node) + key + " " + message + ".");
}

void YamlValue::expected(const std::string& what) const { fail("takes " + what + ", got " + found_in(*this)); }

void YamlValue::expected_one_of(const std::vector<std::string>& names) const {
  const auto hint = node.IsScalar() ? did_you_mean(text(), names) : "";
  throw UsageError(yaml_place(source, node) + key + " takes one of " + c10::Join(", ", names) + ", got " +
                   found_in(*this) + (hint.empty() ? "." : hint));
}

std::string YamlValue::text() const {
  if (!node.IsScalar()) expected("a value");
  return resolved(*this, node.Scalar());
}

int64_t YamlValue::integer(int64_t smallest) const {
  const auto number = node.IsScalar() ? parse_integer(text()) : std::nullopt;
  if (!number || *number < smallest) expected("a whole number of at least " + std::to_string(smallest));
  return *number;
}

double YamlValue::number() const {
  const auto number = node.IsScalar() ? parse_number(text()) : std::nullopt;
  if (!number) expected("a number");
  return *number;
}

bool YamlValue::boolean() const {
  bool on = false;
  if (!node.IsScalar() || !YAML::convert<bool>::decode(YAML::Node(text()), on)) expected("true or false");
  return on;
}

at::ScalarType YamlValue::dtype() const {
  const auto dtype = node.IsScalar() ? parse_dtype(text()) : std::nullopt;
  if (!dtype || !at::isFloatingType(*dtype)) expected_one_of({"fp16", "bf16", "fp32", "fp64"});
  return *dtype;
}

std::vector<std::string> YamlValue::words() const {
  return node.IsScalar() ? std::vector{text()} : list("a value or a list of plain values");
}

std::vector<std::string> YamlValue::list(const std::string& what) const {
  if (!node.IsSequence()) expected(what);
  std::vector<std::string> words;
  for (const auto& item : node) {
    if (!item.IsScalar()) expected(what);
    words.push_back(resolved(*this, item.Scalar()));
  }
  return words;
}

namespace {

namespace fs = std::filesystem;

std::string why_missing(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_symlink(path, ignored)) {
    return "it is a link to " + fs::read_symlink(path, ignored).string() + ", where there is nothing";
  }
  if (path.is_relative()) return "there is no such file, seen from " + fs::current_path(ignored).string();
  return "there is no such file";
}

/// The problem of the path; empty if there is none that its status shows.
std::string fault_of(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) return why_missing(path);
  if (error) return error.message() + "; give this user the right to read it";
  if (status.type() == fs::file_type::directory) return "it is a folder; name the file in it";
  if (status.type() != fs::file_type::regular) {
    return "it is no regular file, and every rank reads it; write it to a file first";
  }
  return "";
}

}  // namespace

std::string read_configuration(const std::string& path, const std::string& name) {
  const auto refuse = [&](const std::string& why) {
    throw UsageError(name + " " + path + " cannot be read: " + why + ".");
  };
  const std::string fault = fault_of(path);
  if (!fault.empty()) refuse(fault);
  std::ifstream file(path);
  if (!file) {
    const bool forbidden = errno == EACCES;
    refuse(std::string(std::strerror(errno)) + (forbidden ? "; give this user the right to read it" : ""));
  }
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) refuse(std::strerror(errno));
  if (text.find_first_not_of(" \t\r\n") == std::string::npos)
    throw UsageError(name + " " + path + " is empty; is it the right file?");
  return text;
}

}  // namespace megashard
