#pragma once

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/values/value.h"
#include "framework/arguments/argument_table.h"

namespace megashard {

/// Arguments, or a scheduler's state, by Megatron's names.
using ArgumentRecord = std::vector<std::pair<std::string, ArgumentValue>>;

/// As checkpoints keep them.
Dict to_dict(const ArgumentRecord& record);
/// The inverse. What an ArgumentValue cannot hold (dtypes, Python objects) is None.
ArgumentRecord to_record(const Dict& dict);
/// Null when absent or None.
const ArgumentValue* find_known(const ArgumentRecord& record, const std::string& name);

}  // namespace megashard
