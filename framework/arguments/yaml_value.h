#pragma once

#include <c10/core/ScalarType.h>
#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// Parses YAML. Throws UsageError with `source` and the line for invalid YAML and for duplicate keys, which yaml-cpp
/// would accept.
YAML::Node load_yaml(const std::string& text, const std::string& source);

/// "FILE:12: ", the beginning of messages about a node.
std::string yaml_place(const std::string& source, const YAML::Node& node);

/// `FILE:12: unknown key "KEY"; did you mean OTHER?`; without a similar name it ends with `otherwise`. `path` is the
/// key with its parents; the known names are its last part.
std::string unknown_key(const std::string& place, const std::string& path, const std::vector<std::string>& known,
                        const std::string& otherwise = "; remove it.");

/// A `key: value` of a YAML file with its context for messages. Members throw UsageError with file, line, key and
/// value.
struct YamlValue {
  const std::string& source;  ///< file name
  std::string key;            ///< including its parents: "actor_train.training_args.learning_rate"
  YAML::Node node;
  const YAML::Node* names = nullptr;  ///< map with the values of ${name}; null: no substitution

  bool is_null() const { return node.IsNull() || (node.IsScalar() && node.Scalar() == "~"); }
  std::string text() const;
  int64_t integer(int64_t smallest) const;
  double number() const;
  bool boolean() const;
  at::ScalarType dtype() const;                                  ///< floating-point dtypes only
  std::vector<std::string> words() const;                        ///< a list, or one word
  std::vector<std::string> list(const std::string& what) const;  ///< a list only

  [[noreturn]] void fail(const std::string& message) const;  ///< message after the key, without full stop
  [[noreturn]] void expected(const std::string& what) const;
  [[noreturn]] void expected_one_of(const std::vector<std::string>& names) const;  ///< suggests the nearest
};

/// Reads the configuration file of a flag; `name` precedes its path in messages: "--config". Throws UsageError with the
/// problem of the path: missing, a folder, not a regular file, unreadable, or empty.
std::string read_configuration(const std::string& path, const std::string& name);

}  // namespace megashard
