#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "framework/diagnostics.h"

namespace megashard {

/// Keeps the messages that a function sends to its sink.
struct CollectedDiagnostics {
  std::vector<std::pair<Severity, std::string>> all;

  DiagnosticSink sink() {
    return [this](Severity severity, const std::string& message) { all.emplace_back(severity, message); };
  }
  /// All messages, one in a line.
  std::string text() const {
    std::string lines;
    for (const auto& [severity, message] : all) lines += message + "\n";
    return lines;
  }
};

/// The message of the UsageError that `call` throws. Fails the test if it throws none.
template <class F>
std::string usage_error(F&& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no UsageError was thrown";
  return "";
}

}  // namespace megashard
