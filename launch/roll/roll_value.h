#pragma once

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "framework/arguments/arguments.h"

namespace megashard {

/// One `key: value` of a ROLL configuration, with what a message needs. Scalars are read with
/// `${name}` replaced. All throw UsageError.
struct RollValue {
  const std::string& file;
  const YAML::Node& root;  ///< of the file, for ${name}
  std::string path;        ///< "actor_train.training_args.learning_rate"
  YAML::Node node;

  bool is_null() const { return node.IsNull() || (node.IsScalar() && node.Scalar() == "~"); }
  std::string text() const;
  int64_t integer(int64_t smallest) const;
  double number() const;
  bool boolean() const;
  std::vector<std::string> words() const;  ///< a list, or one word
  at::ScalarType dtype() const;            ///< bf16, bfloat16, fp32, float32, fp16, float16
  /// Stores it as the value of this flag.
  void store(Arguments& arguments, const std::string& flag) const;

  [[noreturn]] void fail(const std::string& sentence) const;
  [[noreturn]] void expected(const std::string& what) const;
};

}  // namespace megashard
