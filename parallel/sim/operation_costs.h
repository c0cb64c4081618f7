#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <vector>

namespace megashard::sim {

// Seconds on settings().model. The formulas are those of docs/plan.md.

/// What the arithmetic of products and of attention takes; 0 for operators that only move bytes.
/// Of a call that is on the stack.
double arithmetic_seconds(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
/// Of an operator in place: x.add_(y), and not x.zero_().
bool reads_what_it_writes(const std::string& name);
/// A kernel with so much arithmetic that moves so many bytes; `narrow`: its elements have 16 bits.
double kernel_seconds(const std::string& name, double arithmetic, int64_t bytes, bool narrow);
/// Over the ranks of a group; `bytes`: of the tensor that is whole on every rank.
double collective_seconds(const std::string& kind, int64_t bytes, const std::vector<int>& ranks);

}  // namespace megashard::sim
