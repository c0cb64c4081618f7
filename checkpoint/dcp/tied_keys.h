#pragma once

#include <vector>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/values/state_dict_keys.h"

namespace megashard {

/// Gives each further key an entry with the chunks of the other; throws when that has none.
void add_tied_keys(DcpMetadata& metadata, const TiedKeys& tied);
/// The other way: entries that name the very chunks, all of them stored, of an entry before them.
TiedKeys find_tied_keys(const std::vector<DcpEntry>& entries);

}  // namespace megashard
