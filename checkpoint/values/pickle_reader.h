#pragma once

#include <string>
#include <string_view>

#include "checkpoint/values/value.h"

namespace megashard {

/// Reads a Python pickle (protocols 0 to 5, as far as torch, Megatron and DCP write them) as plain
/// data. Nothing is imported, built or called: classes that are not known become Objects that name
/// them. Known are dict (OrderedDict too), torch.Size, torch dtypes and bytes. Bounds: nesting up
/// to 100 deep, and a tree that stays within a fixed multiple of the pickle's own length however
/// often it refers to itself. Anything else throws c10::Error: "WHERE: at byte N: ...", with
/// `where` as given.
Value read_pickle(std::string_view pickle, const std::string& where);

}  // namespace megashard
