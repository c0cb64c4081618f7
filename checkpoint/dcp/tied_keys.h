#pragma once

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dcp/dcp_metadata.h"

namespace megashard {

/// Further keys of tensors whose bytes are stored once, under another key: {key, that one}. PyTorch
/// finds a shared weight under each of its keys.
using TiedKeys = std::vector<std::pair<std::string, std::string>>;

/// Gives each further key an entry with the chunks of the other; throws when that has none.
void add_tied_keys(DcpMetadata& metadata, const TiedKeys& tied);
/// The other way: entries that name the very chunks, all of them stored, of an entry before them.
TiedKeys find_tied_keys(const std::vector<DcpEntry>& entries);

}  // namespace megashard
