#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <vector>

namespace megashard::sim {

// Seconds on settings().model; see docs/plan.md for the formulas.

/// Arithmetic time of products and attention for the call on the stack; 0 for operators that only move bytes.
double arithmetic_seconds(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
/// True for an in-place operator that reads its output: x.add_(y), but not x.zero_().
bool reads_what_it_writes(const std::string& name);
/// Time of a kernel with `arithmetic` seconds that moves `bytes` bytes; `narrow`: 16-bit elements.
double kernel_seconds(const std::string& name, double arithmetic, int64_t bytes, bool narrow);
/// `ranks`: the group; `bytes`: of the tensor that is whole on every rank.
double collective_seconds(const std::string& kind, int64_t bytes, const std::vector<int>& ranks);

}  // namespace megashard::sim
