#pragma once

#include <ATen/record_function.h>

#include <string>

namespace megashard {

/// A range that PyTorch's profiler shows, "FSDP::all_gather (model.layers.0)", as FSDP2's own
/// record_function does; the simulated device names units by it. Free where nobody listens.
class ProfilerRange {
 public:
  ProfilerRange(const char* what, const std::string& unit) : record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive()) record_.before(c10::str("FSDP::", what, " (", unit, ")"));
  }

 private:
  at::RecordFunction record_;
};

}  // namespace megashard
