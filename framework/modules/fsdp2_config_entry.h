#pragma once

#include <yaml-cpp/yaml.h>

#include <optional>
#include <string>
#include <vector>

#include "framework/modules/fsdp2_config.h"

namespace megashard::detail {

/// One `key: value` of an FSDP2 file, with what a message needs. All methods throw UsageError with
/// file, line, key and value.
struct ConfigEntry {
  const std::string& source;
  std::string key;
  YAML::Node value;

  [[noreturn]] void fail(const std::string& expected) const;
  bool boolean() const;
  int integer(int smallest) const;
  at::ScalarType dtype() const;
  std::vector<std::string> words(const char* expected) const;
  std::vector<std::string> patterns() const;
  std::optional<int> sharding_size() const;
  ReshardAfterForward reshard() const;
};

/// Whether the file is one of MindSpeed's native route: fsdp_plan and recompute_plan, at the top or
/// under parallel.
bool is_native_config(const YAML::Node& root);
/// Keys that change nothing here are told to `sink`.
Fsdp2Config parse_native_config(const YAML::Node& root, const std::string& source, const DiagnosticSink& sink);

}  // namespace megashard::detail
