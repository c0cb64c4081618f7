#pragma once

#include <string>

#include "checkpoint/values/value.h"

namespace megashard {

/// The value as a Python pickle of protocol 2, the one that torch.save writes. Strings and class
/// names that recur are written once.
std::string write_pickle(const Value& value);

}  // namespace megashard
