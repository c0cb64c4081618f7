#pragma once

#include <string>

#include "checkpoint/values/value.h"

namespace megashard {

/// Writes the value as a pickle of protocol 2, as torch.save does. Repeated strings and class names are written once.
std::string write_pickle(const Value& value);

}  // namespace megashard
