#pragma once

#include <vector>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/values/state_dict_keys.h"

namespace megashard {

/// Adds an entry with the same chunks for each additional key. Throws if the stored key has no entry.
void add_tied_keys(DcpMetadata& metadata, const TiedKeys& tied);
/// Inverse: finds entries with the same chunks, all of them stored, as an earlier entry.
TiedKeys find_tied_keys(const std::vector<DcpEntry>& entries);

}  // namespace megashard
