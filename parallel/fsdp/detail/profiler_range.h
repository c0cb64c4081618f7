#pragma once

#include <ATen/record_function.h>

#include <string>

namespace megashard {

/// Range in PyTorch's profiler, "FSDP::all_gather (model.layers.0)", as FSDP2's record_function; the simulated device
/// takes unit names from it. Free without an active profiler.
class ProfilerRange {
 public:
  ProfilerRange(const char* what, const std::string& unit) : record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive()) record_.before(c10::str("FSDP::", what, " (", unit, ")"));
  }

 private:
  at::RecordFunction record_;
};

}  // namespace megashard
