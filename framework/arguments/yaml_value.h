#pragma once

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

namespace megashard {

/// The YAML of a file's text. Throws UsageError, with `source` and the line, for text that is no
/// YAML and for a map that has a key twice, of which yaml-cpp would take either.
YAML::Node load_yaml(const std::string& text, const std::string& source);

/// "FILE:12: ": begins messages about what stands there.
std::string yaml_place(const std::string& source, const YAML::Node& node);

/// `FILE:12: unknown key "KEY"; did you mean OTHER?`, where none of the known names is near with `otherwise` at its
/// end. `path` is the key with those around it; the known names are its last part.
std::string unknown_key(const std::string& place, const std::string& path, const std::vector<std::string>& known,
                        const std::string& otherwise = "; remove it.");

/// One `key: value` of a YAML file, with what a message needs. All throw UsageError with file, line, key and value.
struct YamlValue {
  const std::string& source;  ///< the file
  std::string key;            ///< with those around it: "actor_train.training_args.learning_rate"
  YAML::Node node;
  const YAML::Node* names = nullptr;  ///< a map whose values ${name} stands for; null: text is as written

  bool is_null() const { return node.IsNull() || (node.IsScalar() && node.Scalar() == "~"); }
  std::string text() const;
  int64_t integer(int64_t smallest) const;
  double number() const;
  bool boolean() const;
  at::ScalarType dtype() const;                                  ///< of floating point
  std::vector<std::string> words() const;                        ///< a list, or one word
  std::vector<std::string> list(const std::string& what) const;  ///< a list only

  [[noreturn]] void fail(const std::string& message) const;  ///< after the key, without the full stop
  [[noreturn]] void expected(const std::string& what) const;
  [[noreturn]] void expected_one_of(const std::vector<std::string>& names) const;  ///< suggests the nearest
};

}  // namespace megashard
