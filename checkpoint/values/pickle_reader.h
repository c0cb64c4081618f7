#pragma once

#include <string>
#include <string_view>

#include "checkpoint/values/value.h"

namespace megashard {

/// Reads a Python pickle (protocols 0 to 5, as written by torch, Megatron and DCP) as plain data. Nothing is imported,
/// constructed or called: unknown classes become Objects with their names. Known are dict, OrderedDict, torch.Size,
/// torch dtypes and bytes. Nesting is limited to 100, and the tree to a fixed multiple of the pickle's length, even if
/// objects are referenced repeatedly. Other input throws c10::Error: "WHERE: at byte N: ...", with `where` as given.
Value read_pickle(std::string_view pickle, const std::string& where);

}  // namespace megashard
